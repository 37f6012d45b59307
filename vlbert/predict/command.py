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
image. More in docs/predict.md.
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
from vlbert.evaluation.evaluate import recipe_of
from vlbert.predict.attention import write_attention
from vlbert.predict.predictor import Predictor
from vlbert.predict.ranking import Ranker, read_captions
from vlbert.recipes import RECIPES
from vlbert.tasks.retrieval import RetrievalSettings

_PORT = 8000  # of --serve
_MOST_PRINTED = 20  # of a ranking
_OF_PREDICTIONS = ("mask_regions", "choices", "answer", "out", "attention", "heads")  # without use in other modes


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
    port: int | None = None  # of --serve (8000); 0: a free one
    detector: Path | None = None  # the weights of the detector
    recipe: str | None = None  # MODULE:FUNCTION, the recipe of a task of your own
    out: Path | None = None  # the image to write (beside IMAGE)
    attention: bool = False  # also draw which regions each token attends to
    heads: str | None = None  # attention of these layers' heads, both from 0: 1.3,2.0

    @property
    def image(self) -> str:
        """The image's file; with `among` the text."""
        return self.asked[0] if self.asked else ""

    @property
    def text(self) -> str | None:
        return self.asked[1] if len(self.asked) > 1 else None

    def __post_init__(self):
        if self.serve:
            return
        if len(self.asked) > 2:
            raise ValueError(f"{self.asked[2]!r} stands behind the text; write a text of several words in quotes")
        if self.port is not None:
            raise ValueError("--port belongs to --serve")
        if not self.image:
            raise ValueError("--among needs a text" if self.among else "an image is missing")
        if self.among and self.text:
            raise ValueError(f"--among takes a text and no image; {self.image} and {self.text!r} are two")


def open_predictor(options: Options, fields: Sequence[str]) -> Predictor:
    """The checkpoint of the command line; one of retrieval ranks, too."""
    task = read_config_at(*find_checkpoint(options.checkpoint)).get("task")
    if task == RetrievalSettings.__name__:
        return Ranker(options.checkpoint, options.detector, _changes(options, fields))
    recipe = find_recipe(options.recipe, RECIPES)() if options.recipe else None
    return Predictor(options.checkpoint, options.detector, _changes(options, fields), recipe)


def _changes(options: Options, fields: Sequence[str]) -> dict[str, Any]:
    """The fields of the checkpoint's recipe that the command line names."""
    return named_fields(override(recipe_of(open_checkpoint(options.checkpoint)), fields), fields) if fields else {}


def predict_and_draw(options: Options, fields: Sequence[str]) -> None:
    """Print and draw the prediction of the command line."""
    file, attentions = output_file(options), options.attention or bool(options.heads)
    if attentions and options.text is None and not options.mask_regions:
        raise ValueError("--attention needs a text")
    if attentions:
        require("matplotlib", "--attention", "attention")
    predictor = open_predictor(options, fields)
    asked = (options.text, options.choices, options.answer, options.mask_regions)
    prediction = predictor(options.image, *asked, attentions)
    figure = write_attention(prediction, file, options.heads) if attentions else None
    prediction.draw().save(file)
    for text, probability in prediction.lines():
        print(text if probability is None else f"  {probability:.3f}  {text}")
    print(f"drawn: {file}")
    if figure:
        print(f"attention: {figure}")


def output_file(options: Options) -> Path:
    """The file to draw the prediction into. ValueError where that is the image itself, or no folder."""
    what = "answer" if options.text is not None or options.mask_regions else "regions"
    image = Path(options.image)
    out = options.out or image.with_name(f"{image.stem}-{what}.png")
    if options.out and not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    if out.suffix.lower() not in (".png", ".jpg", ".jpeg"):
        raise ValueError(f"--out {out}: name a .png or .jpg file")
    if out.resolve() == image.resolve():
        raise ValueError(f"--out {out} is the image itself; name another file")
    return out


def rank(options: Options, fields: Sequence[str]) -> None:
    """Print the ranking of --among or --captions."""
    mode, others = ("captions", ("among", "text")) if options.captions else ("among", ())
    _refuse_unused(options, mode, *_OF_PREDICTIONS, "recipe", *others)
    captions = read_captions(options.captions) if options.captions else []
    ranker = Ranker(options.checkpoint, options.detector, _changes(options, fields))
    if options.among is None:
        found = ranker.captions(options.image, captions)
    else:
        print(options.image)
        found = ranker.images(options.among, options.image, lambda line: print(f"skipped: {line}", file=sys.stderr))
    for name, probability in found[:_MOST_PRINTED]:
        print(f"  {probability:.3f}  {name}")
    if len(found) > _MOST_PRINTED:
        print(f"  and {len(found) - _MOST_PRINTED} more")


def serve_page(options: Options, fields: Sequence[str]) -> None:
    """Serve the page of --serve, until Ctrl-C."""
    _refuse_unused(options, "serve", "image", "text", "among", "captions", *_OF_PREDICTIONS)
    for package in ("fastapi", "uvicorn"):
        require(package, "--serve", "serve")
    from vlbert.predict.page import serve  # here, because it needs these

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        predictor = open_predictor(options, fields)
        predictor.detector  # noqa: B018  built now: what is wrong with it ends the program
    notes = [str(one.message) for one in caught]
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    serve(predictor, notes, _PORT if options.port is None else options.port)


def _refuse_unused(options: Options, mode: str, *names: str) -> None:
    if unused := [name for name in names if getattr(options, name)]:
        raise ValueError(f"{unused[0]} has no use beside --{mode}")


def main(arguments: Sequence[str] | None = None) -> None:
    """`vlbert predict`: what is no option is a field of the checkpoint's recipe, as --task.folder=vqa."""
    options, fields = parse_known(Options, arguments, "vlbert predict", description=__doc__)
    run = serve_page if options.serve else rank if options.among or options.captions else predict_and_draw
    with warnings.catch_warnings():
        # The manual of `warnings` allows it.
        warnings.showwarning = lambda message, *_: print(f"note: {message}", file=sys.stderr)  # ty: ignore[invalid-assignment]
        try:
            run(options, fields)
        except KeyboardInterrupt:  # while the checkpoint is loaded
            sys.exit(130)
        except (ValueError, OSError) as error:
            sys.exit(f"vlbert predict: {error}")
