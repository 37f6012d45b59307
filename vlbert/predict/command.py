"""Run a trained model on an image of your own: detector, regions and model in one process.

    vlbert predict CHECKPOINT photo.jpg                       # draws the regions with their numbers
    vlbert predict CHECKPOINT photo.jpg "a red [MASK]"        # pre-training: predicts words
    vlbert predict CHECKPOINT photo.jpg --mask-regions 2,5    # and regions whose pixels are masked
    vlbert predict CHECKPOINT photo.jpg "what is on the table?"                          # VQA
    vlbert predict CHECKPOINT photo.jpg "the left cup"                                   # RefCOCO+
    vlbert predict ANSWERS,RATIONALES photo.jpg "why does [1] laugh?" \\
        --choices "..." "..." "..." "..." --rationales "..." "..." "..." "..."                     # VCR
    vlbert predict CHECKPOINT --among FOLDER "a red circle"   # retrieval: ranks the images of a folder
    vlbert predict CHECKPOINT photo.jpg --captions FILE       # or the captions of a file, one a line
    vlbert predict CHECKPOINT --serve                         # all of this on a page: drop an image there

CHECKPOINT is ROOT/runs/RUN (its newest), ROOT/runs/RUN/best or /step-*, or any folder with a model and its task's
head; to rank, one of retrieval or a pre-training with the relationship head. Draws a prediction into a file beside the
image. More in docs/predict.md.
"""

import argparse
import functools
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from detectors.detect import FasterRCNNDetector
from detectors.rebuild import detector_of_file, rebuild_detector
from storage.programs import make_parser, require
from storage.sample import Regions, Sample, check_sample
from training.program import find_recipe
from vlbert.checkpoint import DETECTOR, Checkpoint, find_checkpoint, open_checkpoint, read_config_at
from vlbert.config import Recipe
from vlbert.data.batch import collate
from vlbert.data.image_file import read_image
from vlbert.data.images import prepare_image
from vlbert.evaluation.evaluate import load_task_model
from vlbert.predict.attention import write_attention
from vlbert.predict.page import PORT, serve
from vlbert.predict.prediction import Prediction, class_name, drawn_shapes_alone, predict_in_turn
from vlbert.predict.ranking import Ranker, Ranking, ranking_recipe, read_captions
from vlbert.recipes import RECIPES
from vlbert.tasks.retrieval import RetrievalSettings
from vlbert.tasks.vcr import VCRSettings

_MOST_PRINTED = 20  # of a ranking


class Predictor:
    """A checkpoint and its detector, loaded once:

        predictor = Predictor("demo-root/runs/pretrain")
        print(predictor("photo.jpg", "a red [MASK]").answer)

    detector: a weight file, where that of the training is not found. overrides: fields of the checkpoint's recipe, such
    as "task.folder=vqa". recipe: the checkpoint's, for a task that this package does not know. ValueError where the
    checkpoint cannot be loaded.
    """

    def __init__(
        self,
        checkpoint: str,
        detector: str | Path | None = None,
        overrides: Sequence[str] = (),
        recipe: Recipe | None = None,
    ):
        self.checkpoint = open_checkpoint(str(checkpoint))
        self.model, self.recipe = load_task_model(self.checkpoint, overrides, recipe)
        self.task = self.model.task
        self._detector_file = detector

    @functools.cached_property
    def detector(self) -> FasterRCNNDetector:
        """The detector whose regions the checkpoint was trained on, rebuilt from its description."""
        return remade_detector(self.checkpoint, self._detector_file)

    @property
    def subtask(self) -> str | None:
        """What a VCR model chooses, "answer" or "rationale"; None for other tasks."""
        return self.recipe.task.subtask if isinstance(self.recipe.task, VCRSettings) else None

    def detect(self, image: str | Path | bytes | Image.Image) -> Sample:
        """The sample of an image, as it would be stored, with its regions."""
        return with_regions(read_image(image), self.detector)

    def __call__(
        self,
        image: str | Path | bytes | Image.Image | Sample,
        text: str | None = None,
        choices: Sequence[str] = (),
        answer: str = "",
        mask_regions: Sequence[int] = (),
        attentions: bool = False,
    ) -> Prediction:
        """The model's prediction for a text about an image, or about a sample that `detect` returned.

        choices, answer and mask_regions are for the tasks that take them. Without a text and regions to mask, the
        prediction has the regions alone. ValueError where the image cannot be read, or the task does not take these
        arguments.
        """
        if text is None and (choices or answer):
            raise ValueError("choices and answers belong to a question; give a text")
        if text is not None and not text.strip() and not mask_regions:
            raise ValueError("the text is empty; write one, or leave it out to see the regions")
        regions_alone = text is None and not mask_regions
        annotation = None if regions_alone else self.task.annotation_for(text or "", choices, answer, mask_regions)
        sample = image if isinstance(image, Sample) else self.detect(image)
        if sample.regions is None:
            raise ValueError(f"{sample.url}: the sample has no regions; `detect` gives one that has")
        classes = self.detector.metadata.get("classes")
        names = region_names(sample.regions, classes)
        if regions_alone:
            return Prediction(sample, names)
        prepared = prepare_image(sample, self.recipe.model.regions, flip=False)
        batch = collate([self.task.example(sample, prepared, annotation, np.random.default_rng(0))])
        self._check_room(batch.tokens.shape[1])
        with torch.inference_mode():
            encoded = self.model.vlbert(batch, attentions=attentions)
            (row,) = self.task.predictions(self.model.vlbert, self.model.head, encoded, batch)
        vocabulary = self.task.vocabulary
        tokens = [
            [vocabulary.tokens[token] for token in row[:count].tolist()]
            for row, count in zip(batch.tokens, batch.sizes.tokens, strict=True)
        ]
        return Prediction(sample, names, with_class_names(row, names, classes), batch, tokens, encoded)

    def _check_room(self, tokens: int) -> None:
        room = self.recipe.model.max_positions - self.model.vlbert.embedding.positions_behind_text
        if tokens > room:
            raise ValueError(
                f"the text is too long: it has {tokens} tokens with [CLS] and [SEP], the model has room for {room} "
                "(max_positions); shorten it"
            )


def open_ranker(checkpoint: str, detector: str | Path | None = None, overrides: Sequence[str] = ()) -> Ranker:
    """The ranker of a checkpoint of retrieval, or of a pre-training with the relationship head; arguments as of
    Predictor, ValueError for other checkpoints."""
    recipe = ranking_recipe(read_config_at(*find_checkpoint(str(checkpoint))))
    predictor = Predictor(checkpoint, detector, overrides, recipe)
    return Ranker(predictor.model, predictor.recipe, predictor.detect)


def remade_detector(checkpoint: Checkpoint, file: str | Path | None) -> FasterRCNNDetector:
    """The detector whose regions a checkpoint was trained on or, where it names none, the network of `file`.

    file: its weights; None: those beside the model, or that its Fast R-CNN started from, if they are the same.
    """
    beside = Path(checkpoint.folder.where_of(DETECTOR))
    file = file or (beside if beside.is_file() else None)
    recorded = checkpoint.config.get("detector") or {}
    metadata = recorded.get("metadata") or {}
    if "network" in metadata and metadata["boxes"] != "given":
        return rebuild_detector(recorded, file or trained_from(checkpoint.config), checkpoint.where)
    why = f"its regions came from {metadata['backend']} boxes" if metadata else "it carries no detector's description"
    if file is None:
        raise ValueError(f"{checkpoint.where} finds no regions by itself: {why}; name a detector: --detector FILE")
    warnings.warn(f"{checkpoint.where}: {why}; those of {file} may be of another kind", stacklevel=2)
    return detector_of_file(file, keep_features=checkpoint.model_config.regions.features == "precomputed")


def trained_from(config: dict) -> str | None:
    """The weight file that a model's Fast R-CNN started from, directly or through earlier runs."""
    weights, before = config["model"]["regions"]["weights"], config.get("recipe", {}).get("init_from")
    if weights or not before:
        return weights
    try:
        return trained_from(read_config_at(*find_checkpoint(before)))
    except (ValueError, OSError):  # that run is gone
        return None


def with_regions(sample: Sample, detector: FasterRCNNDetector) -> Sample:
    """The sample with the regions that the detector finds; ValueError where it finds none."""
    (regions,) = detector.detect([sample])
    if isinstance(regions, str):
        raise ValueError(f"{sample.url}: the detector finds no regions: {regions}")
    sample = replace(sample, regions=regions)
    check_sample(sample)
    return sample


def region_names(regions: Regions, classes: Sequence[str] | None) -> list[str]:
    """Number, from 1, and class of each region."""
    labels = (regions.labels_background_first() - 1).tolist()
    return [f"{number} {classes[label]}" if classes else str(number) for number, label in enumerate(labels, 1)]


def with_class_names(row: dict, names: Sequence[str], classes: Sequence[str] | None) -> dict:
    """A row with the detector's class names for its regions: those that it ranks or draws (`region`, from 1) and those
    that pre-training masked, whose class is a number, background first."""
    numbers = {one["answer"]: one["region"] for one in row["ranking"] if one.get("region")}
    name_of = {answer: names[number - 1] for answer, number in numbers.items()} if classes else {}
    boxes = [{"region": numbers.get(box["name"], 0)} | box for box in row["boxes"]]
    row = row | {
        "answer": name_of.get(row["answer"], row["answer"]),
        "ranking": [one | {"answer": name_of.get(one["answer"], one["answer"])} for one in row["ranking"]],
        "boxes": [box | {"name": name_of.get(box["name"], box["name"])} for box in boxes],
    }
    if "masked_regions" not in row:
        return row

    masked = [
        region
        | {
            "detected_name": class_name(region["detected"], classes),
            "guesses": [guess | {"answer": class_name(guess["class"], classes)} for guess in region["guesses"]],
        }
        for region in row["masked_regions"]
    ]
    boxes = [
        box | {"name": f"{region['region']}: {region['guesses'][0]['answer']}?"}
        for box, region in zip(row["boxes"], masked, strict=True)
    ]
    answer = row["answer"] if row["masks"] or not masked else masked[0]["guesses"][0]["answer"]
    return row | {"answer": answer, "masked_regions": masked, "boxes": boxes}


# --- command line -----------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("vlbert predict", "\n\n".join(__doc__.split("\n\n")[:2]))
    parser.add_argument("checkpoint", help="ROOT/runs/RUN, ROOT/runs/RUN/step-*, or a folder; for VCR two, by a comma")
    parser.add_argument("image", nargs="?", help="an image of any usual format; with --among the text")
    parser.add_argument("text", nargs="?", help="the question; without it the regions are drawn with their numbers")
    parser.add_argument("fields", nargs="*", metavar="field=value", help="of the recipe, such as task.folder=vqa")
    parser.add_argument("--mask-regions", type=_numbers, default=(), metavar="2,5", help="regions to mask and predict")
    parser.add_argument("--choices", nargs="+", default=(), help="VCR: the answers to choose from")
    parser.add_argument(
        "--answer", default="", help="VCR, --rationales alone: the answer to explain; VQA: the right one"
    )
    parser.add_argument("--rationales", nargs="+", default=(), help="VCR: the rationales to choose from")
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


def predictions_of(options: argparse.Namespace) -> list[Prediction]:
    """One prediction for each checkpoint of the command line."""
    attentions = options.attention or bool(options.heads)
    if attentions and options.text is None and not options.mask_regions:
        raise ValueError("--attention needs a text")
    if attentions:
        require("matplotlib", "--attention")
    if "," in options.checkpoint and not (options.choices and options.rationales):
        raise ValueError("2 checkpoints: two are for VCR alone, with --choices and --rationales")
    predictors = _predictors(options)
    if drawn := drawn_shapes_alone(predictors[0].detector.metadata):
        print(f"note: {drawn}", file=sys.stderr)
    _check_used(options, *(predictor.subtask for predictor in predictors))
    if len(predictors) == 2:
        _share_detector(*predictors)
    return predict_in_turn(
        predictors,
        options.image,
        options.text,
        options.choices,
        options.rationales,
        options.answer,
        options.mask_regions,
        attentions,
    )


def _predictors(options: argparse.Namespace) -> list[Predictor]:
    names = options.checkpoint.split(",")
    if len(names) > 2:
        raise ValueError(f"{len(names)} checkpoints: two are for VCR alone, with --choices and --rationales")
    recipe = find_recipe(options.recipe, RECIPES)() if options.recipe else None
    return [Predictor(name, options.detector, options.fields, recipe) for name in names]


def _check_used(options: argparse.Namespace, *subtasks: str | None) -> None:
    """ValueError where these checkpoints would ignore an option."""
    given = [name for name in ("choices", "answer", "rationales") if getattr(options, name)]
    if given and options.text is None:
        raise ValueError(f"--{given[0]} needs a text")
    _check_pair(*subtasks)
    if len(subtasks) == 1 and {"choices", "rationales"} <= {*given}:
        raise ValueError("answers and rationales are chosen by two runs: name both checkpoints, joined by a comma")
    used = {
        ("answer",): "choices",
        ("rationale",): "answer, rationales",
        ("answer", "rationale"): "choices, rationales",
    }
    used = used.get(subtasks, "choices, answer").split(", ")  # other tasks check these themselves
    for name in given:
        if name not in used:
            takes = " and ".join(f"--{one}" for one in used)
            raise ValueError(f"--{name}: this checkpoint {f'takes {takes}' if subtasks[0] else 'is none for VCR'}")


def _check_pair(*subtasks: str | None) -> None:
    if len(subtasks) == 2 and subtasks != ("answer", "rationale"):
        raise ValueError("2 checkpoints: VCR takes one for answers and one for rationales, in this order")


def _share_detector(first: Predictor, second: Predictor) -> None:
    """Both get the same regions, with the same numbers: those of the first one's detector."""
    one, other = (predictor.checkpoint.config.get("detector", {}).get("id") for predictor in (first, second))
    if one != other:
        warnings.warn(
            f"{second.checkpoint.where} was trained on the regions of detector {other}; it gets those of {one}, as "
            f"{first.checkpoint.where} does",
            stacklevel=2,
        )
    second.detector = first.detector


def output_files(options: argparse.Namespace) -> list[Path]:
    """The files to draw the predictions into. ValueError where that is the image itself, or no folder."""
    what = "answer" if options.text is not None or options.mask_regions else "regions"
    out = options.out or options.image.with_name(f"{options.image.stem}-{what}.png")
    if options.out and not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    if out.suffix.lower() not in (".png", ".jpg", ".jpeg"):
        raise ValueError(f"--out {out}: name a .png or .jpg file")
    if out.resolve() == options.image.resolve():
        raise ValueError(f"--out {out} is the image itself; name another file")
    return [out, out.with_name(f"{out.stem}-rationale{out.suffix}")]


def rank(options: argparse.Namespace) -> None:
    """Prints the ranking of --among or --captions."""
    others = ("mask_regions", "choices", "answer", "rationales", "recipe", "out", "attention", "heads")
    unused = [name for name in others if getattr(options, name)]
    unused += ["among"] if options.among and options.captions else []
    unused += ["text"] if options.captions and options.text else []
    if unused:
        used = "--captions" if options.captions else "--among"
        raise ValueError(f"{unused[0].replace('_', '-')} has no use beside {used}")
    captions = read_captions(options.captions) if options.captions else []
    ranker = open_ranker(options.checkpoint, options.detector, options.fields)
    if options.captions:
        _print_ranking(ranker.captions(options.image, captions))
    else:
        print(options.text)
        found = ranker.images(options.among, options.text, lambda line: print(f"skipped: {line}", file=sys.stderr))
        _print_ranking(found)


def _print_ranking(found: Ranking) -> None:
    for name, probability in found[:_MOST_PRINTED]:
        print(f"  {probability:.3f}  {name}")
    if len(found) > _MOST_PRINTED:
        print(f"  and {len(found) - _MOST_PRINTED} more")


def predict_and_draw(options: argparse.Namespace) -> None:
    """Prints and draws the predictions of the command line."""
    files = output_files(options)
    found = list(zip(predictions_of(options), files, strict=False))
    figures = [write_attention(*one, options.heads) for one in found if options.attention or options.heads]
    for prediction, file in found:
        prediction.draw().save(file)
        for text, probability in prediction.lines():
            print(text if probability is None else f"  {probability:.3f}  {text}")
        print(f"drawn: {file}")
    for figure in figures:
        print(f"attention: {figure}")


def serve_page(options: argparse.Namespace) -> None:
    """--serve: the page, until Ctrl-C."""
    others = ("image", "text", "mask_regions", "choices", "answer", "rationales", "among", "captions", "out")
    if unused := [name for name in (*others, "attention", "heads") if getattr(options, name)]:
        raise ValueError(f"{unused[0].replace('_', '-')} has no use beside --serve: the page asks for it")
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", UserWarning)
        predictors = _predictors(options)
        _check_pair(*(predictor.subtask for predictor in predictors))
        if len(predictors) == 2:
            _share_detector(*predictors)
        predictors[0].detector  # noqa: B018  built now: what is wrong with it ends the program
        ranking = _ranking_predictor(options, predictors[0])
    for note in notes:
        warnings.warn(note.message, stacklevel=1)
    port = PORT if options.port is None else options.port
    serve(predictors, ranking, [str(note.message) for note in notes], port)


def _ranking_predictor(options: argparse.Namespace, predictor: Predictor) -> Predictor | None:
    """That which ranks captions, with the same detector; None where the checkpoint cannot."""
    if isinstance(predictor.recipe.task, RetrievalSettings):
        return predictor
    if not getattr(predictor.recipe.task, "relationship", False):
        return None
    recipe = ranking_recipe(predictor.checkpoint.config)
    fields = [field for field in options.fields if not field.startswith("task.")]  # those are of the pre-training
    ranking = Predictor(options.checkpoint, options.detector, fields, recipe)
    ranking.detector = predictor.detector
    return ranking


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
