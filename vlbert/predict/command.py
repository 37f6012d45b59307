"""Run a trained model on an image of your own: detector, regions and model in one process.

    vlbert predict CHECKPOINT photo.jpg                       # draws the regions with their numbers
    vlbert predict CHECKPOINT photo.jpg "a red [MASK]"        # pre-training: predicts words
    vlbert predict CHECKPOINT photo.jpg --mask_regions 2 5    # and regions whose pixels are masked
    vlbert predict CHECKPOINT photo.jpg "what is on the table?"                          # VQA
    vlbert predict CHECKPOINT photo.jpg "the left cup"                                   # RefCOCO+
    vlbert predict CHECKPOINT photo.jpg "why does [1] laugh?" --choices "..." "..." "..." "..."      # VCR
    vlbert predict CHECKPOINT --among FOLDER "a red circle"   # retrieval: ranks the images of a folder
    vlbert predict CHECKPOINT photo.jpg --captions FILE       # or the captions of a file, one a line
    vlbert predict CHECKPOINT --serve                         # asks on a page: drop an image there

CHECKPOINT is ROOT/runs/RUN (its newest), ROOT/runs/RUN/best or /step-*, or any folder with a model and its task's
head; to rank, one of retrieval or a pre-training with the relationship head. Draws a prediction into a file beside the
image. More in docs/library.md.
"""

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from storage.programs import Checkpoint, Positional, require
from storage.settings import named_fields, override, parse_known
from training.program import find_recipe
from vlbert.checkpoint import find_checkpoint, open_checkpoint, read_config_at
from vlbert.datasets.files import read_lines
from vlbert.evaluation.evaluate import recipe_of
from vlbert.predict.attention import draw_attention
from vlbert.predict.predictor import Predictor
from vlbert.predict.ranking import Ranker
from vlbert.recipes import RECIPES
from vlbert.tasks.retrieval import RetrievalSettings


@dataclass(frozen=True)
class Options:
    checkpoint: Checkpoint
    # an image file, and a text or question about it; without one the regions are drawn with their numbers. With --among
    # a text alone
    asked: Annotated[tuple[str, ...], Positional, arg(metavar="IMAGE [TEXT]")] = ()
    mask_regions: tuple[int, ...] = ()  # numbers of regions to mask and predict
    choices: tuple[str, ...] = ()  # VCR: the answers, or rationales, to choose from
    answer: str = ""  # VCR: the answer that the rationales explain; VQA: the right one
    among: Path | None = None  # rank the images of a folder by how they fit the text
    captions: Path | None = None  # rank the captions of a file, one a line
    serve: bool = False  # a page in the browser, for this machine alone
    port: int = 8000  # of --serve; 0: a free one
    detector: Path | None = None  # the weights of the detector
    recipe: str | None = None  # MODULE:FUNCTION, the recipe of a task of your own
    out: Path | None = None  # the image to write (beside IMAGE)
    attention: bool = False  # also draw which regions each token attends to

    @property
    def text(self) -> str | None:
        return self.asked[1] if len(self.asked) > 1 else None

    def __post_init__(self):
        if not (self.serve or self.asked):
            raise ValueError("--among needs a text" if self.among else "an image is missing")
        if len(self.asked) > (most := 1 if self.among else 2):
            raise ValueError(f"{self.asked[most]!r} is one too many; --among takes a text alone, in quotes")


def open_predictor(options: Options, fields: Sequence[str]) -> Predictor:
    """The checkpoint of the command line; one of retrieval ranks, too."""
    task = read_config_at(*find_checkpoint(options.checkpoint)).get("task")
    if task == RetrievalSettings.__name__:
        return Ranker(options.checkpoint, options.detector, _changes(options, fields))
    recipe = find_recipe(options.recipe, RECIPES)() if options.recipe else None
    return Predictor(options.checkpoint, options.detector, _changes(options, fields), recipe)


def _changes(options: Options, fields: Sequence[str]) -> dict[str, Any]:
    """The fields of the checkpoint's recipe that the command line names."""
    if not fields:
        return {}
    return named_fields(override(recipe_of(open_checkpoint(options.checkpoint, tensors=False)), fields), fields)


def predict_and_draw(options: Options, fields: Sequence[str]) -> None:
    """Print and draw the prediction of the command line."""
    file = output_file(options)
    asked = (options.text, options.choices, options.answer, options.mask_regions)
    prediction = open_predictor(options, fields)(options.asked[0], *asked, options.attention)
    figure = draw_attention(prediction) if options.attention else None
    prediction.draw().save(file)
    for text, probability in prediction.lines():
        print(text if probability is None else f"  {probability:.3f}  {text}")
    print(f"drawn: {file}")
    if figure:
        beside = file.with_name(f"{file.stem}-attention.png")
        beside.write_bytes(figure)
        print(f"attention: {beside}")


def output_file(options: Options) -> Path:
    """The file to draw the prediction into. ValueError where that is the image itself."""
    what = "answer" if options.text is not None or options.mask_regions else "regions"
    image = Path(options.asked[0])
    out = options.out or image.with_name(f"{image.stem}-{what}.png")
    if out.resolve() == image.resolve():
        raise ValueError(f"--out {out} is the image itself; name another file")
    return out


def rank(options: Options, fields: Sequence[str]) -> None:
    """Print the ranking of --among or --captions."""
    captions = read_lines(options.captions, "--captions") if options.captions else []
    ranker = Ranker(options.checkpoint, options.detector, _changes(options, fields))
    asked = options.asked[0]
    found = ranker.images(options.among, asked) if options.among else ranker.captions(asked, captions)
    for name, probability in found:
        print(f"  {probability:.3f}  {name}")


def serve_page(options: Options, fields: Sequence[str]) -> None:
    """Serve the page of --serve, until Ctrl-C."""
    for package in ("fastapi", "uvicorn"):
        require(package, "--serve", "serve")
    from vlbert.predict.page import serve  # here, because it needs these

    predictor = open_predictor(options, fields)
    predictor.detector  # noqa: B018  built now: what is wrong with it ends the program
    serve(predictor, options.port)


def main(arguments: Sequence[str] | None = None) -> None:
    """`vlbert predict`: what is no option is a field of the checkpoint's recipe, as --task.folder=vqa."""
    options, fields = parse_known(Options, arguments, "vlbert predict", description=__doc__)
    run = serve_page if options.serve else rank if options.among or options.captions else predict_and_draw
    with warnings.catch_warnings():
        # The manual of `warnings` allows it.
        warnings.showwarning = lambda message, *_: print(f"note: {message}", file=sys.stderr)  # ty: ignore[invalid-assignment]
        try:
            run(options, fields)
        except (ValueError, OSError) as error:
            sys.exit(f"vlbert predict: {error}")
