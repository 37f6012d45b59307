"""Run a trained model on your own image: detector and model in one process.

    vlbert predict CHECKPOINT photo.jpg                       # draws the regions with their numbers
    vlbert predict CHECKPOINT photo.jpg "a red [MASK]"        # pre-training: predicts words
    vlbert predict CHECKPOINT photo.jpg --mask_regions 2 5    # pre-training: predicts masked regions
    vlbert predict CHECKPOINT photo.jpg "what is on the table?"                          # VQA
    vlbert predict CHECKPOINT photo.jpg "the left cup"                                   # RefCOCO+
    vlbert predict CHECKPOINT photo.jpg "why does [1] laugh?" --choices "..." "..." "..." "..."      # VCR
    vlbert predict CHECKPOINT --among FOLDER "a red circle"   # retrieval: ranks the images of a folder
    vlbert predict CHECKPOINT photo.jpg --captions FILE       # retrieval: ranks the lines of a file
    vlbert predict CHECKPOINT --serve                         # serves a page where you drop images

CHECKPOINT is ROOT/runs/RUN (its newest checkpoint), ROOT/runs/RUN/best or /step-*, or any folder with a model and its
task's head. Only checkpoints for retrieval, or for pre-training with the relationship head, can rank. A drawing of
the prediction is saved in the working directory. See docs/library.md.
"""

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from storage.programs import Checkpoint, Positional, require
from storage.settings import named_fields, override, parse_known
from vlbert.checkpoint import open_checkpoint
from vlbert.datasets.files import read_lines
from vlbert.evaluation.evaluate import recipe_of
from vlbert.predict.attention import draw_attention
from vlbert.predict.predictor import Predictor
from vlbert.predict.ranking import Ranker
from vlbert.tasks.retrieval import RetrievalSettings


@dataclass(frozen=True)
class Options:
    checkpoint: Checkpoint
    # an image file, and a text or question about it. Without a text, the regions are drawn with their numbers. With
    # --among, only a text
    inputs: Annotated[tuple[str, ...], Positional, arg(metavar="IMAGE [TEXT]")] = ()
    mask_regions: tuple[int, ...] = ()  # numbers of regions to mask and predict
    choices: tuple[str, ...] = ()  # VCR: the answers, or rationales, to choose from
    answer: str = ""  # VCR: the answer that the rationales explain; VQA: the right one
    among: Path | None = None  # rank the images of a folder by how well they fit the text
    captions: Path | None = None  # rank the captions of a file, one per line
    serve: bool = False  # serve a page to the browsers of this machine
    port: int = 8000  # port of --serve; 0: a free one
    detector: Path | None = None  # weight file of the detector
    out: Path | None = None  # image file to write, or a folder for it; None: the working directory
    attention: bool = False  # also draw which regions each token attends to

    @property
    def text(self) -> str | None:
        return self.inputs[1] if len(self.inputs) > 1 else None

    def __post_init__(self):
        if not (self.serve or self.inputs):
            raise ValueError("--among needs a text" if self.among else "an image is missing")
        if len(self.inputs) > (most := 1 if self.among else 2):
            raise ValueError(f"unexpected argument {self.inputs[most]!r}; put texts in quotes; --among takes one text")


def open_predictor(options: Options, changes: Mapping[str, Any]) -> Predictor:
    """Load the predictor for the command line's options: a Ranker for a retrieval checkpoint, otherwise a Predictor."""
    task = open_checkpoint(options.checkpoint, tensors=False).config.get("task")
    kind = Ranker if task == RetrievalSettings.__name__ else Predictor
    return kind(options.checkpoint, options.detector, changes)


def predict_and_draw(options: Options, changes: Mapping[str, Any]) -> None:
    """Print the prediction for an image and a text, and save a drawing of it."""
    file = output_file(options)
    question = (options.text, options.choices, options.answer, options.mask_regions)
    prediction = open_predictor(options, changes)(options.inputs[0], *question, options.attention)
    figure = draw_attention(prediction) if options.attention else None
    prediction.draw().save(file)
    for text, probability in prediction.lines():
        print(text if probability is None else f"  {probability:.3f}  {text}")
    print(f"drawn: {file}")
    if figure:
        attention_file = file.with_name(f"{file.stem}-attention.png")
        attention_file.write_bytes(figure)
        print(f"attention: {attention_file}")


def output_file(options: Options) -> Path:
    """Return the path of the drawing to write. Raises ValueError if it is the path of the input image."""
    kind = "answer" if options.text is not None or options.mask_regions else "regions"
    image = Path(options.inputs[0])
    out = options.out or Path()
    out = out / f"{image.stem}-{kind}.png" if out.is_dir() else out
    if out.resolve() == image.resolve():
        raise ValueError(f"--out {out} is the image itself; name another file")
    return out


def rank(options: Options, changes: Mapping[str, Any]) -> None:
    """Rank images (--among) for a text, or captions (--captions) for an image. Print them with probabilities."""
    captions = read_lines(options.captions, "--captions") if options.captions else []
    ranker = Ranker(options.checkpoint, options.detector, changes)
    given = options.inputs[0]
    ranking = ranker.images(options.among, given) if options.among else ranker.captions(given, captions)
    for name, probability in ranking:
        print(f"  {probability:.3f}  {name}")


def serve_page(options: Options, changes: Mapping[str, Any]) -> None:
    """Serve the web page (option --serve) until Ctrl-C."""
    for package in ("fastapi", "uvicorn"):
        require(package, "--serve", "serve")
    from vlbert.predict.page import serve  # here, because it needs these

    predictor = open_predictor(options, changes)
    predictor.detector  # noqa: B018  built now, so that errors end the program
    serve(predictor, options.port)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `vlbert predict`. Unknown options set fields of the checkpoint's recipe, such as --task.folder=vqa."""
    options, fields = parse_known(Options, arguments, "vlbert predict", description=__doc__)
    run = serve_page if options.serve else rank if options.among or options.captions else predict_and_draw
    with warnings.catch_warnings():
        # Python's documentation of `warnings` allows this.
        warnings.showwarning = lambda message, *_: print(f"note: {message}", file=sys.stderr)  # ty: ignore[invalid-assignment]
        try:
            recipe = recipe_of(open_checkpoint(options.checkpoint, tensors=False)) if fields else None
            run(options, named_fields(override(recipe, fields), fields) if recipe else {})
        except (ValueError, OSError) as error:
            sys.exit(f"vlbert predict: {error}")
