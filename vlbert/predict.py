"""Ask a trained model about a picture of one's own: detector, regions and model in one process.

    python -m vlbert.predict CHECKPOINT photo.jpg                       # draws the regions with their numbers
    python -m vlbert.predict CHECKPOINT photo.jpg "a red [MASK]"        # pre-training: guesses words ...
    python -m vlbert.predict CHECKPOINT photo.jpg --hide 2,5            # ... and regions whose pixels are hidden
    python -m vlbert.predict CHECKPOINT photo.jpg "what is on the table?"                          # VQA
    python -m vlbert.predict CHECKPOINT photo.jpg "the left cup"                                   # RefCOCO+
    python -m vlbert.predict ANSWERS,RATIONALES photo.jpg "why does [0] laugh?" \\
        --choices "..." "..." "..." "..." --rationales "..." "..." "..." "..."                     # VCR

CHECKPOINT is ROOT/runs/RUN (its newest), ROOT/runs/RUN/step-*, or any folder with a model and its task's head. Writes a
picture beside IMAGE and says where. docs/predict.md tells more.
"""

import argparse
import functools
import io
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from detectors.described import described_detector, detector_of_file
from detectors.detect import FasterRCNNDetector
from storage.normalise import ImageSettings, Refused, normalise
from storage.sample import Regions, Sample, sample_key
from vlbert.batch import Batch, collate
from vlbert.checkpoint import Checkpoint, open_checkpoint
from vlbert.drawing import BOX_COLOURS, draw_boxes, write_below
from vlbert.evaluate import load_task_model
from vlbert.model import Encoded
from vlbert.pictures import view
from vlbert.tasks.vcr import VCR

SIDE = 800  # pixels of the longer side of what is drawn
# As at ingest, but for the size of the file: cameras write larger ones than a caption list's server should send.
IMAGES = ImageSettings(max_bytes=200 * 2**20)


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a model says about a picture.

    sample    the picture as it would be stored, with its regions
    names     of the regions, in their order: number and, where the detector knows it, class
    row       what the task's `predictions` say (vlbert/tasks/__init__.py); None where nothing was asked
    pieces    the word pieces that the model read, special tokens included
    encoded   with attention maps, where they were asked for; one row, or one a choice
    seconds   of the detector, the model
    """

    sample: Sample
    names: list[str]
    row: dict | None = None
    batch: Batch | None = None
    pieces: list[list[str]] = field(default_factory=list)
    encoded: Encoded | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def said(self) -> str:
        """The answer."""
        return self.row["said"] if self.row else ""

    @property
    def chosen(self) -> int:
        """The row of the batch that the answer comes from: of several choices, that of the one that was chosen."""
        return int(np.argmax(self.row["probabilities"])) if len(self.pieces) > 1 else 0

    def lines(self) -> list[tuple[str, float | None]]:
        """What was asked and said, line by line, with the probability of each that has one."""
        if self.row is None:
            return [(f"{len(self.names)} regions: {', '.join(self.names)}", None)]
        row = self.row
        told = [(row["asked"], None)] if row["asked"] else []
        if "[UNK]" in self.pieces[self.chosen]:
            told.append((f"read as: {' '.join(self.pieces[self.chosen])}", None))
        told += [(one["said"], one["probability"]) for one in row["ranking"]]
        masks = row.get("masks", [])
        for number, mask in enumerate(masks if len(masks) > 1 else [], 1):
            told.append((f"[MASK] {number} by itself", None))
            told += [(one["said"], one["probability"]) for one in mask["guesses"]]
        for region in row.get("hidden_regions", []):
            told.append((f"region {region['region']}, hidden; the detector saw {region['detected_name']}", None))
            told += [(one["said"], one["probability"]) for one in region["guesses"]]
        return told

    def draw(self) -> Image.Image:
        """The picture with the boxes that the answer names (where nothing was asked, with all), and the answer below
        it."""
        if self.row is None:
            boxes = list(zip(self.sample.regions.boxes, self.names, strict=True))[::-1]  # the likeliest on top
        else:
            boxes = [(np.array(box["box"], np.float32), box["name"]) for box in self.row["boxes"]]
        coloured = [(box, BOX_COLOURS[i % len(BOX_COLOURS)], name) for i, (box, name) in enumerate(boxes)]
        return write_below(draw_boxes(self.sample, coloured, SIDE), self.lines())


class Predictor:
    """A checkpoint and its detector, loaded once, to be asked many times:

        predictor = Predictor("demo-root/runs/pretrain")
        print(predictor("photo.jpg", "a red [MASK]").said)

    detector: a weight file, where the one that the checkpoint learned from is not where it was. overrides: fields of
    the checkpoint's recipe, such as "task.folder=vqa". ValueError where the checkpoint is none that can be asked.
    """

    def __init__(self, checkpoint: str, detector: str | Path | None = None, overrides: Sequence[str] = ()):
        self.checkpoint = open_checkpoint(str(checkpoint))
        self.model, self.recipe = load_task_model(self.checkpoint, overrides)
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
        return remade_detector(self.checkpoint, self._detector_file, self.recipe.model.regions.weights)

    def see(self, image: str | Path | bytes) -> Sample:
        """The picture of a file (or of its bytes) as it would be stored, with its regions."""
        sample = read_image(image)
        (regions,) = self.detector.detect([sample])
        if isinstance(regions, str):
            raise ValueError(f"{sample.url}: the detector finds no regions: {regions}")
        return Sample(**vars(sample) | {"regions": regions})

    def __call__(
        self,
        image: str | Path | bytes | Sample,
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
        started = time.monotonic()
        sample = image if isinstance(image, Sample) else self.see(image)
        seconds = {"detector": time.monotonic() - started}
        classes = self.detector.about.get("classes")
        names = region_names(sample.regions, classes, first=0 if isinstance(self.task, VCR) else 1)
        if text is None and not hide:
            return Prediction(sample, names, seconds=seconds)
        if not (text or "").strip() and not hide:
            raise ValueError("the text is empty; ask something, or leave it out to see the regions")
        started = time.monotonic()
        ask = self.task.ask(text or "", choices, answer, hide)
        seen = view(sample, self.recipe.model.regions, flip=False)
        batch = collate([self.task.example(sample, seen, ask, np.random.default_rng(0))])
        with torch.inference_mode():
            encoded = self.model.vlbert(batch, attentions=attentions)
            (row,) = self.task.predictions(self.model.vlbert, self.model.head, encoded, batch)
        seconds["model"] = time.monotonic() - started
        vocabulary = self.task.vocabulary
        pieces = [
            [vocabulary.pieces[token] for token in tokens[mask].tolist()]
            for tokens, mask in zip(batch.tokens, batch.text_mask, strict=True)
        ]
        return Prediction(sample, names, with_class_names(row, classes), batch, pieces, encoded, seconds)


def read_image(image: str | Path | bytes) -> Sample:
    """A file's picture as ingest would store it: upright, RGB or grey, JPEG. ValueError says why it cannot be one."""
    name = "the image" if isinstance(image, bytes) else str(image)
    try:
        data = image if isinstance(image, bytes) else Path(image).read_bytes()
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror or error}") from error
    try:
        picture = normalise(_common(data), IMAGES)
    except Refused as refused:
        raise ValueError(f"{name} cannot be taken: {refused.detail} ({refused.status})") from refused
    return Sample(
        key=sample_key(name, ""),
        image=picture.image,
        caption="",
        url=name,
        width=picture.width,
        height=picture.height,
        sha256=picture.sha256,
        flags=picture.flags,
    )


def _common(data: bytes) -> bytes:
    """The file itself or, of a format that Pillow knows and ingest does not take, such as TIFF, a PNG of it."""
    try:
        with Image.open(io.BytesIO(data)) as opened:
            width, height = opened.size
            # Of what is too large, no more than the header: normalise refuses it by that.
            if opened.format in ("JPEG", "MPO", "PNG", "GIF", "WEBP", "BMP") or width * height > IMAGES.max_pixels:
                return data
            file = io.BytesIO()
            plain = opened.mode in ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")
            (opened if plain else opened.convert("RGB")).save(file, "PNG", exif=opened.getexif(), compress_level=1)
            return file.getvalue()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return data  # normalise says what is wrong with it


def remade_detector(checkpoint: Checkpoint, file: str | Path | None, trained_from: str | None) -> FasterRCNNDetector:
    """The detector whose regions a checkpoint learned from or, where it names none, the network of `file`.

    file: its weights; where None, those that the model's Fast R-CNN started from, `trained_from`, if they are the same.
    """
    recorded = checkpoint.config.get("detector") or {}
    about = recorded.get("about") or {}
    if "network" in about and about["boxes"] != "given":
        return described_detector(recorded, file or trained_from, checkpoint.where)
    why = f"its regions came from {about['backend']} boxes" if about else "it carries no detector's description"
    if file is None:
        raise ValueError(f"{checkpoint.where} finds no regions by itself: {why}; name a detector: --detector FILE")
    warnings.warn(f"{checkpoint.where}: {why}; those of {file} may be of another kind", stacklevel=2)
    return detector_of_file(file, keep_features=checkpoint.model_config.regions.features == "precomputed")


def region_names(regions: Regions, classes: Sequence[str] | None, first: int) -> list[str]:
    """Number and class of each region. Numbers begin with `first`: VCR counts its objects from 0, all else from 1."""
    labels = (regions.labels_background_first() - 1).tolist()
    return [f"{number} {classes[label]}" if classes else str(number) for number, label in enumerate(labels, first)]


def with_class_names(row: dict, classes: Sequence[str] | None) -> dict:
    """A pre-training's row with the names of the classes beside their numbers, which are background first."""
    if "hidden_regions" not in row:
        return row

    def name(number: int) -> str:
        return "nothing" if number == 0 else classes[number - 1] if classes else f"class {number}"

    hidden = [
        region
        | {
            "detected_name": name(region["detected"]),
            "guesses": [guess | {"said": name(guess["class"])} for guess in region["guesses"]],
        }
        for region in row["hidden_regions"]
    ]
    boxes = [
        box | {"name": f"{region['region']}: {region['guesses'][0]['said']}?"}
        for box, region in zip(row["boxes"], hidden, strict=True)
    ]
    return row | {"hidden_regions": hidden, "boxes": boxes}


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
    parser.add_argument("--answer", default="", help="VCR, rationales alone: the answer that they are to explain")
    parser.add_argument("--rationales", nargs="+", default=(), help="VCR: the rationales to choose from")
    parser.add_argument("--detector", type=Path, metavar="FILE", help="the weights of the detector")
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
    if len(names) == 1 and options.choices and options.rationales:
        raise ValueError("answers and rationales are chosen by two runs: name both checkpoints, joined by a comma")
    predictors = [Predictor(name, options.detector, options.set) for name in names]
    predictors[0].detector  # noqa: B018  loaded here, for the time that is told
    loading = time.monotonic() - started
    choices = options.choices or options.rationales
    found = [predictors[0](options.image, options.text, choices, options.answer, options.hide, attentions)]
    if len(predictors) == 2:
        predictors[1].detector = predictors[0].detector
        answer = options.choices[found[0].chosen]  # as it was written: what is said has names in place of [0]
        found.append(predictors[1](found[0].sample, options.text, options.rationales, answer, (), attentions))
    return found, loading


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
    for prediction, file in zip(found, files, strict=False):
        for text, probability in prediction.lines():
            print(text if probability is None else f"  {probability:.3f}  {text}")
        prediction.draw().save(file)
        print(f"drawn: {file}")
    work["drawing"] = time.monotonic() - started
    if options.attention or options.heads:
        from vlbert.attention import write_attention

        for prediction, file in zip(found, files, strict=False):
            for line in write_attention(prediction, file, options.heads):
                print(line)
        work["attention"] = time.monotonic() - started - work["drawing"]
    return work


if __name__ == "__main__":
    main()
