"""Run a trained model on an image of your own: detector, regions and model in one process.

    vlbert predict CHECKPOINT photo.jpg                       # draws the regions with their numbers
    vlbert predict CHECKPOINT photo.jpg "a red [MASK]"        # pre-training: predicts words
    vlbert predict CHECKPOINT photo.jpg --mask-regions 2,5    # and regions whose pixels are masked
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

import argparse
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from storage.programs import make_parser, require
from training.program import find_recipe
from vlbert.checkpoint import find_checkpoint, read_config_at
from vlbert.predict.attention import write_attention
from vlbert.predict.prediction import drawn_shapes_alone
from vlbert.predict.predictor import Predictor
from vlbert.predict.ranking import Ranker, read_captions
from vlbert.recipes import RECIPES
from vlbert.tasks.retrieval import RetrievalSettings

PORT = 8000  # of --serve
_MOST_PRINTED = 20  # of a ranking
_OF_PREDICTIONS = ("mask_regions", "choices", "answer", "out", "attention", "heads")  # without use in other modes


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("vlbert predict", "\n\n".join(__doc__.split("\n\n")[:2]))
    parser.add_argument("checkpoint", help="ROOT/runs/RUN, ROOT/runs/RUN/step-*, or a folder")
    parser.add_argument("image", nargs="?", help="an image of any usual format; with --among the text")
    parser.add_argument("text", nargs="?", help="the question; without it the regions are drawn with their numbers")
    parser.add_argument("fields", nargs="*", metavar="field=value", help="of the recipe, such as task.folder=vqa")
    parser.add_argument("--mask-regions", type=_numbers, default=(), metavar="2,5", help="regions to mask and predict")
    parser.add_argument("--choices", nargs="+", default=(), help="VCR: the answers, or rationales, to choose from")
    parser.add_argument("--answer", default="", help="VCR: the answer that the rationales explain; VQA: the right one")
    parser.add_argument("--among", type=Path, metavar="FOLDER", help="rank the images of a folder by how they fit TEXT")
    parser.add_argument("--captions", type=Path, metavar="FILE", help="rank the captions of a file, one a line")
    parser.add_argument("--serve", action="store_true", help="a page in the browser, for this machine alone")
    parser.add_argument("--port", type=int, metavar="N", help=f"of --serve ({PORT}); 0: a free one")
    parser.add_argument("--detector", type=Path, metavar="FILE", help="the weights of the detector")
    parser.add_argument("--recipe", metavar="MODULE:FUNCTION", help="the recipe of a task of your own")
    parser.add_argument("--out", type=Path, help="the image to write (beside IMAGE)")
    parser.add_argument("--attention", action="store_true", help="also draw which regions each token attends to")
    parser.add_argument("--heads", metavar="1.3,2.0", help="attention of these layers' heads, both from 0")
    options = parser.parse_intermixed_args(arguments)
    for name in ("text", "image") if options.serve else ("text",):
        if re.fullmatch(r"[a-z_.]+=\S*", getattr(options, name) or ""):  # none, but the first field
            options.fields = [getattr(options, name), *options.fields]
            setattr(options, name, None)
    if options.serve:
        return options
    if options.port is not None:
        parser.error("--port belongs to --serve")
    if options.image is None:
        parser.error("--among needs a text" if options.among else "an image is missing")
    if options.among:
        if options.text:
            parser.error(f"--among takes a text and no image; {options.image} and {options.text!r} are two")
        options.image, options.text = None, options.image
    else:
        options.image = Path(options.image)
    return options


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of regions' numbers, such as 2,5") from None


def open_predictor(options: argparse.Namespace) -> Predictor:
    """The checkpoint of the command line; one of retrieval ranks, too."""
    task = read_config_at(*find_checkpoint(options.checkpoint)).get("task")
    if task == RetrievalSettings.__name__:
        return Ranker(options.checkpoint, options.detector, options.fields)
    recipe = find_recipe(options.recipe, RECIPES)() if options.recipe else None
    return Predictor(options.checkpoint, options.detector, options.fields, recipe)


def predict_and_draw(options: argparse.Namespace) -> None:
    """Print and draw the prediction of the command line."""
    file, attentions = output_file(options), options.attention or bool(options.heads)
    if attentions and options.text is None and not options.mask_regions:
        raise ValueError("--attention needs a text")
    if attentions:
        require("matplotlib", "--attention")
    predictor = open_predictor(options)
    if drawn := drawn_shapes_alone(predictor.detector.metadata):
        print(f"note: {drawn}", file=sys.stderr)
    asked = (options.text, options.choices, options.answer, options.mask_regions)
    prediction = predictor(options.image, *asked, attentions)
    figure = write_attention(prediction, file, options.heads) if attentions else None
    prediction.draw().save(file)
    for text, probability in prediction.lines():
        print(text if probability is None else f"  {probability:.3f}  {text}")
    print(f"drawn: {file}")
    if figure:
        print(f"attention: {figure}")


def output_file(options: argparse.Namespace) -> Path:
    """The file to draw the prediction into. ValueError where that is the image itself, or no folder."""
    what = "answer" if options.text is not None or options.mask_regions else "regions"
    out = options.out or options.image.with_name(f"{options.image.stem}-{what}.png")
    if options.out and not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    if out.suffix.lower() not in (".png", ".jpg", ".jpeg"):
        raise ValueError(f"--out {out}: name a .png or .jpg file")
    if out.resolve() == options.image.resolve():
        raise ValueError(f"--out {out} is the image itself; name another file")
    return out


def rank(options: argparse.Namespace) -> None:
    """Print the ranking of --among or --captions."""
    mode, others = ("captions", ("among", "text")) if options.captions else ("among", ())
    _refuse_unused(options, mode, *_OF_PREDICTIONS, "recipe", *others)
    captions = read_captions(options.captions) if options.captions else []
    ranker = Ranker(options.checkpoint, options.detector, options.fields)
    if options.captions:
        found = ranker.captions(options.image, captions)
    else:
        print(options.text)
        found = ranker.images(options.among, options.text, lambda line: print(f"skipped: {line}", file=sys.stderr))
    for name, probability in found[:_MOST_PRINTED]:
        print(f"  {probability:.3f}  {name}")
    if len(found) > _MOST_PRINTED:
        print(f"  and {len(found) - _MOST_PRINTED} more")


def serve_page(options: argparse.Namespace) -> None:
    """Serve the page of --serve, until Ctrl-C."""
    _refuse_unused(options, "serve", "image", "text", "among", "captions", *_OF_PREDICTIONS)
    for package in ("fastapi", "uvicorn"):
        require(package, "--serve")
    from vlbert.predict.page import serve  # here, because it needs these

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        predictor = open_predictor(options)
        predictor.detector  # noqa: B018  built now: what is wrong with it ends the program
    notes = [str(one.message) for one in caught]
    notes += filter(None, [drawn_shapes_alone(predictor.detector.metadata)])
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    serve(predictor, notes, PORT if options.port is None else options.port)


def _refuse_unused(options: argparse.Namespace, mode: str, *names: str) -> None:
    if unused := [name for name in names if getattr(options, name)]:
        raise ValueError(f"{unused[0].replace('_', '-')} has no use beside --{mode}")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with warnings.catch_warnings():
        # The manual of `warnings` allows it.
        warnings.showwarning = lambda message, *_: print(f"note: {message}", file=sys.stderr)  # ty: ignore[invalid-assignment]
        try:
            if options.serve:
                serve_page(options)
            elif options.among or options.captions:
                rank(options)
            else:
                predict_and_draw(options)
        except KeyboardInterrupt:  # while the checkpoint is loaded
            sys.exit(130)
        except (ValueError, OSError) as error:
            sys.exit(f"vlbert predict: {error}")


if __name__ == "__main__":
    main()
