"""Ask a trained model about a picture of one's own: detector, regions and model in one process.

    python -m vlbert.predict CHECKPOINT photo.jpg                       # draws the regions with their numbers
    python -m vlbert.predict CHECKPOINT photo.jpg "a red [MASK]"        # pre-training: guesses words ...
    python -m vlbert.predict CHECKPOINT photo.jpg --hide 2,5            # ... and regions whose pixels are hidden
    python -m vlbert.predict CHECKPOINT photo.jpg "what is on the table?"                          # VQA
    python -m vlbert.predict CHECKPOINT photo.jpg "the left cup"                                   # RefCOCO+
    python -m vlbert.predict ANSWERS,RATIONALES photo.jpg "why does [1] laugh?" \\
        --choices "..." "..." "..." "..." --rationales "..." "..." "..." "..."                     # VCR

CHECKPOINT is ROOT/runs/RUN (its newest), ROOT/runs/RUN/best or /step-*, or any folder with a model and its task's
head. Writes a picture beside IMAGE and says where. docs/predict.md tells more.
"""

import argparse
import functools
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from detectors.detect import FasterRCNNDetector
from detectors.rebuild import detector_of_file, rebuild_detector
from storage.sample import Regions, Sample, check_sample
from training.loop import find_recipe
from vlbert.attention_figure import attention_of, chosen_heads, write_attention
from vlbert.checkpoint import Checkpoint, find_checkpoint, open_checkpoint, read_config_at
from vlbert.config import Recipe
from vlbert.data.batch import collate
from vlbert.data.image_file import read_image
from vlbert.data.images import prepare_image
from vlbert.evaluate import load_task_model
from vlbert.prediction import Prediction
from vlbert.recipes import RECIPES

KINDS = ("answer", "rationale")  # of what a model for VCR judges


class Predictor:
    """A checkpoint and its detector, loaded once, to be asked many times:

        predictor = Predictor("demo-root/runs/pretrain")
        print(predictor("photo.jpg", "a red [MASK]").said)

    detector: a weight file, where the one that the checkpoint learned from is not where it was. overrides: fields of
    the checkpoint's recipe, such as "task.folder=vqa". recipe: its own, for a task that this package does not know.
    ValueError where the checkpoint is none that can be asked.
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
        if not hasattr(self.task, "ask"):
            raise ValueError(
                f"{self.checkpoint.where}: the task of {type(self.recipe.task).__name__} takes no question of one's "
                "own; it has no method ask"
            )
        self._detector_file = detector

    @functools.cached_property
    def detector(self) -> FasterRCNNDetector:
        """That whose regions the checkpoint learned from, made again from its description."""
        return remade_detector(self.checkpoint, self._detector_file)

    @property
    def judges(self) -> str | None:
        """What a model for VCR chooses, "answer" or "rationale"; None of other tasks."""
        judges = getattr(self.recipe.task, "question", None)
        return judges if judges in KINDS else None

    def see(self, image: str | Path | bytes | Image.Image) -> Sample:
        """The picture of a file, of its bytes, or of Pillow's, as it would be stored, with its regions."""
        sample = read_image(image)
        (regions,) = self.detector.detect([sample])
        if isinstance(regions, str):
            raise ValueError(f"{sample.url}: the detector finds no regions: {regions}")
        sample = Sample(**vars(sample) | {"regions": regions})
        check_sample(sample)
        return sample

    def __call__(
        self,
        image: str | Path | bytes | Image.Image | Sample,
        text: str | None = None,
        choices: Sequence[str] = (),
        answer: str = "",
        hide: Sequence[int] = (),
        attentions: bool = False,
    ) -> Prediction:
        """What the model says to the text about the image, or about a sample that `see` has found the regions of.

        choices, answer and hide are for the tasks that take them. Without a text and regions to hide, the prediction
        has the regions alone. ValueError where the image is no such thing, or the task cannot ask this.
        """
        if text is None and (choices or answer):
            raise ValueError("choices and answers belong to a question; give a text")
        if text is not None and not text.strip() and not hide:
            raise ValueError("the text is empty; ask something, or leave it out to see the regions")
        started = time.monotonic()
        sample = image if isinstance(image, Sample) else self.see(image)
        seconds = {"detector": time.monotonic() - started}
        classes = self.detector.metadata.get("classes")
        names = region_names(sample.regions, classes)
        if text is None and not hide:
            return Prediction(sample, names, seconds=seconds)
        started = time.monotonic()
        ask = self.task.ask(text or "", choices, answer, hide)
        seen = prepare_image(sample, self.recipe.model.regions, flip=False)
        batch = collate([self.task.example(sample, seen, ask, np.random.default_rng(0))])
        self._check_room(batch.tokens.shape[1])
        with torch.inference_mode():
            encoded = self.model.vlbert(batch, attentions=attentions)
            (row,) = self.task.predictions(self.model.vlbert, self.model.head, encoded, batch)
        seconds["model"] = time.monotonic() - started
        vocabulary = self.task.vocabulary
        pieces = [
            [vocabulary.tokens[token] for token in tokens[mask].tolist()]
            for tokens, mask in zip(batch.tokens, batch.text_mask, strict=True)
        ]
        return Prediction(sample, names, with_class_names(row, names, classes), batch, pieces, encoded, seconds)

    def _check_room(self, pieces: int) -> None:
        room = self.recipe.model.max_positions - 2  # less that of all regions, and [END]'s
        if pieces > room:
            raise ValueError(
                f"the text is too long: it has {pieces} word pieces with [CLS] and [SEP], the model has room for "
                f"{room} (max_positions); shorten it"
            )


def remade_detector(checkpoint: Checkpoint, file: str | Path | None) -> FasterRCNNDetector:
    """The detector whose regions a checkpoint learned from or, where it names none, the network of `file`.

    file: its weights; where None, those that the model's Fast R-CNN started from, if they are the same.
    """
    recorded = checkpoint.config.get("detector") or {}
    metadata = recorded.get("metadata") or {}
    if "network" in metadata and metadata["boxes"] != "given":
        return rebuild_detector(recorded, file or _trained_from(checkpoint.config), checkpoint.where)
    why = f"its regions came from {metadata['backend']} boxes" if metadata else "it carries no detector's description"
    if file is None:
        raise ValueError(f"{checkpoint.where} finds no regions by itself: {why}; name a detector: --detector FILE")
    warnings.warn(f"{checkpoint.where}: {why}; those of {file} may be of another kind", stacklevel=2)
    return detector_of_file(file, keep_features=checkpoint.model_config.regions.features == "precomputed")


def _trained_from(config: dict) -> str | None:
    """The weight file that a model's Fast R-CNN started from, or that of the run that it started from itself."""
    weights, before = config["model"]["regions"]["weights"], config.get("recipe", {}).get("init_from")
    if weights or not before:
        return weights
    try:
        return _trained_from(read_config_at(*find_checkpoint(before)))
    except (ValueError, OSError):  # that run is gone
        return None


def region_names(regions: Regions, classes: Sequence[str] | None) -> list[str]:
    """Number, from 1, and class of each region."""
    labels = (regions.labels_background_first() - 1).tolist()
    return [f"{number} {classes[label]}" if classes else str(number) for number, label in enumerate(labels, 1)]


def with_class_names(row: dict, names: Sequence[str], classes: Sequence[str] | None) -> dict:
    """A row with the names of the detector's classes where it speaks of regions: of those that it ranks (their `region`
    is a number from 1), and of those that pre-training hid, whose class is a number, background first."""
    numbers = {one["said"]: one["region"] for one in row["ranking"] if one.get("region")}
    called = {said: names[number - 1] for said, number in numbers.items()} if classes else {}
    boxes = [{"region": numbers.get(box["name"], 0)} | box for box in row["boxes"]]
    row = row | {
        "said": called.get(row["said"], row["said"]),
        "ranking": [one | {"said": called.get(one["said"], one["said"])} for one in row["ranking"]],
        "boxes": [box | {"name": called.get(box["name"], box["name"])} for box in boxes],
    }
    if "hidden_regions" not in row:
        return row

    def name(number: int) -> str:
        return "nothing" if number == 0 else classes[number - 1] if classes else f"class {number}"

    masked = [
        region
        | {
            "detected_name": name(region["detected"]),
            "guesses": [guess | {"said": name(guess["class"])} for guess in region["guesses"]],
        }
        for region in row["hidden_regions"]
    ]
    boxes = [
        box | {"name": f"{region['region']}: {region['guesses'][0]['said']}?"}
        for box, region in zip(row["boxes"], masked, strict=True)
    ]
    said = row["said"] if row["masks"] or not masked else masked[0]["guesses"][0]["said"]
    return row | {"said": said, "hidden_regions": masked, "boxes": boxes}


# --- command line -----------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vlbert.predict",
        description="\n\n".join(__doc__.split("\n\n")[:2]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", help="ROOT/runs/RUN, ROOT/runs/RUN/step-*, or a folder; for VCR two, by a comma")
    parser.add_argument("image", type=Path, help="a picture of any usual format")
    parser.add_argument("text", nargs="?", help="what is asked; without it the regions are drawn with their numbers")
    parser.add_argument("--hide", type=_numbers, default=(), metavar="2,5", help="regions to be hidden, and guessed")
    parser.add_argument("--choices", nargs="+", default=(), help="VCR: the answers to choose from")
    parser.add_argument(
        "--answer", default="", help="VCR, --rationales alone: the answer to explain; VQA: the right one"
    )
    parser.add_argument("--rationales", nargs="+", default=(), help="VCR: the rationales to choose from")
    parser.add_argument("--detector", type=Path, metavar="FILE", help="the weights of the detector")
    parser.add_argument("--recipe", metavar="MODULE:FUNCTION", help="the recipe of a task of your own")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="such as task.folder=vqa")
    parser.add_argument("--out", type=Path, help="the picture to write (beside IMAGE)")
    parser.add_argument("--attention", action="store_true", help="also draw which regions each word looks at")
    parser.add_argument("--heads", metavar="1.3,2.0", help="attention of these layers' heads, both from 0")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of regions' numbers, such as 2,5") from None


def predictions_asked(options: argparse.Namespace) -> tuple[list[Prediction], float]:
    """What the command line asks, one prediction a checkpoint, and the seconds that loading took."""
    started = time.monotonic()
    attentions = options.attention or bool(options.heads)
    if attentions and options.text is None and not options.hide:
        raise ValueError("--attention: whose words? Give a text")
    names = options.checkpoint.split(",")
    if len(names) > 2 or (len(names) == 2 and not (options.choices and options.rationales)):
        raise ValueError(f"{len(names)} checkpoints: two are for VCR alone, with --choices and --rationales")
    recipe = find_recipe(options.recipe, RECIPES)() if options.recipe else None
    predictors = [Predictor(name, options.detector, options.set, recipe) for name in names]
    _check_used(options, [predictor.judges for predictor in predictors])
    predictors[0].detector  # noqa: B018  loaded here, for the time that is told
    loading = time.monotonic() - started
    choices = options.choices or options.rationales
    found = [predictors[0](options.image, options.text, choices, options.answer, options.hide, attentions)]
    if len(predictors) == 2:
        _share_detector(*predictors)
        answer = options.choices[found[0].chosen]  # as it was written: what is said has names in place of [1]
        found.append(predictors[1](found[0].sample, options.text, options.rationales, answer, (), attentions))
    return found, loading


def _check_used(options: argparse.Namespace, judges: Sequence[str | None]) -> None:
    """ValueError where an option is not for what these checkpoints judge, and would be passed over."""
    given = [name for name in ("choices", "answer", "rationales") if getattr(options, name)]
    if given and options.text is None:
        raise ValueError(f"--{given[0]}: to which question? Give a text")
    if len(judges) == 2 and tuple(judges) != KINDS:
        if tuple(judges) == KINDS[::-1]:
            raise ValueError("the checkpoints are the other way round: name that for answers first")
        raise ValueError("2 checkpoints: VCR takes one for answers and one for rationales, in this order")
    if len(judges) == 2:
        takes = {"choices", "rationales"}
    elif {"choices", "rationales"} <= {*given}:
        raise ValueError("answers and rationales are chosen by two runs: name both checkpoints, joined by a comma")
    else:  # what another task takes it says itself, but for rationales
        takes = {"answer": {"choices"}, "rationale": {"answer", "rationales"}}.get(judges[0], {"choices", "answer"})
    unused = [name for name in given if name not in takes]
    if unused:
        what = {"answer": "judges answers", "rationale": "judges rationales"}.get(judges[0], "is none for VCR")
        way = f"; give {' and '.join(f'--{name}' for name in sorted(takes))}" if judges[0] in KINDS else ""
        raise ValueError(f"--{unused[0]}: this checkpoint {what}{way}")


def _share_detector(first: Predictor, second: Predictor) -> None:
    """Both speak of the same regions, by the same numbers: those of the first one's detector."""
    theirs, its = ((one.checkpoint.config.get("detector") or {}).get("id") for one in (first, second))
    if theirs != its:
        warnings.warn(
            f"{second.checkpoint.where} learned from the regions of detector {its}; it is asked about those of "
            f"{theirs}, as {first.checkpoint.where} is",
            stacklevel=2,
        )
    second.detector = first.detector


def output_files(options: argparse.Namespace, count: int) -> list[Path]:
    """Where the pictures of `count` predictions go. ValueError where that is the image itself, or no folder."""
    asked = options.text is not None or bool(options.hide)
    out = options.out or options.image.with_name(f"{options.image.stem}-{'answer' if asked else 'regions'}.png")
    if options.out and not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    if out.suffix.lower() not in (".png", ".jpg", ".jpeg"):
        raise ValueError(f"--out {out}: name a .png or .jpg file")
    if out.resolve() == options.image.resolve():
        raise ValueError(f"--out {out} is the image itself; name another file")
    try:
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        if options.image.exists():  # else that is what is wrong
            raise ValueError(
                f"{out.parent} cannot be written to ({error.strerror}); name a file elsewhere: --out FILE"
            ) from error
    return [out, out.with_name(f"{out.stem}-rationale{out.suffix}")][:count]


def main(arguments: Sequence[str] | None = None) -> None:
    imports = time.process_time()  # of the whole program so far: `python -m` imports the package before this file
    options = _parser().parse_args(arguments)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"note: {message}", file=sys.stderr)
        try:
            work = ask_and_draw(options)
        except (ValueError, OSError) as error:
            sys.exit(f"python -m vlbert.predict: {error}")
    told = ", ".join(f"{name} {seconds:.2f}" for name, seconds in work.items())
    print(f"imports {imports:.2f} s of CPU; work {sum(work.values()):.2f} s: {told}")


def ask_and_draw(options: argparse.Namespace) -> dict[str, float]:
    """Print and draw what the command line asks; the seconds of each part of the work."""
    files = output_files(options, 2)
    found, loading = predictions_asked(options)
    work = {"loading": loading}
    work |= {name: sum(one.seconds.get(name, 0.0) for one in found) for name in ("detector", "model")}
    started = time.monotonic()
    if options.heads:
        for prediction in found:
            chosen_heads(attention_of(prediction), options.heads)  # an error, before anything is told
    for prediction, file in zip(found, files, strict=False):
        for text, probability in prediction.lines():
            print(text if probability is None else f"  {probability:.3f}  {text}")
        prediction.draw().save(file)
        print(f"drawn: {file}")
    work["drawing"] = time.monotonic() - started
    if options.attention or options.heads:
        for prediction, file in zip(found, files, strict=False):
            print(f"attention: {write_attention(prediction, file, options.heads)}")
        work["attention"] = time.monotonic() - started - work["drawing"]
    return work


if __name__ == "__main__":
    main()
