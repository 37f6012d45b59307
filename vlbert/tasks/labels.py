"""Labels of your own for pairs of an image and a text: one label, several, or a number (docs/your-own-labels.md).

torchrun -m vlbert.train finetune_labels --data.root ROOT --task.train labels.csv --init_from ROOT/runs/...
"""

import contextlib
import csv
import functools
import hashlib
import io
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from storage.reading import Samples
from storage.safe_json import short_repr
from storage.sample import Sample
from vlbert.config import ModelConfig
from vlbert.data.batch import Batch, Example, TextInput, select
from vlbert.data.images import PreparedImage
from vlbert.datasets.files import image_name, read_text
from vlbert.model.heads import Classifier
from vlbert.model.vlbert import Encoded, VLBert
from vlbert.tasks.base import Examples, Task, TaskSettings, invalid_reason, make_examples

HELD_OUT = "held-out"
_OTHER_TOKENS = 4  # positions besides the text: [CLS], [SEP], the regions and [END]
_MAX_RANKED = 5


@dataclass(frozen=True)
class LabelSettings(TaskSettings):
    train: str = ""  # CSV file with the columns image, text and label
    validate_on: str = HELD_OUT  # held-out: a tenth of the images in `train`, which are not trained on; or a CSV file
    folder: str = ""  # folder of the files; empty: the working directory
    # one: each row has one label; several: any number of labels, such as red|round; number: a number to predict
    label: Literal["one", "several", "number"] = "one"
    text_length: int = 60  # maximum tokens; training skips longer texts, evaluation cuts them

    @property
    def train_on(self) -> tuple[str, ...]:  # ty: ignore[incompatible-property-override]
        return (self.train,) * bool(self.train)

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(name for name in (self.train, self.validate_on) if name not in ("", HELD_OUT))

    def lengths(self, text_rows: bool = False) -> dict[str, int]:
        return {"text_length": _OTHER_TOKENS}

    def to_train(self) -> "LabelSettings":
        return self if self.validate_on == HELD_OUT else replace(self, validate_on=self.train)


class Labels(Task):
    saved = ("labels",)
    validate_shuffled = True

    @staticmethod
    def best_metric(settings: LabelSettings) -> str:
        return {"one": "accuracy", "several": "f1", "number": "r2"}[settings.label]

    @functools.cached_property
    def labels(self) -> list:
        """The labels of the training rows, one for each output. For numbers: their mean and standard deviation."""
        rows = [row["label"] for row in self._rows(None) if not row["reason"]]
        if self.settings.label == "number":
            numbers = np.array(rows, np.float64)
            labels = [float(numbers.mean()), float(numbers.std())] if len({*rows}) > 1 else []
        else:
            labels = sorted({label for row in rows for label in self._split(row)})
        if len(labels) < 2:
            raise ValueError(f"{self.settings.train} needs rows with two different labels or more to train on")
        return labels

    @property
    def outputs(self) -> int:
        return 1 if self.settings.label == "number" else len(self.labels)

    def examples(self, samples: Samples, split: str | None) -> Examples:
        found = []
        for row in self._rows(split):
            unknown = self.settings.label != "number" and {*self._split(row["label"])} - {*self.labels}
            unknown = f"no row to train on has the label {short_repr(min(unknown))}" if unknown else ""
            long = invalid_reason(row["text"], "text_length", self.settings.text_length, self.vocabulary)
            found.append((row, row["place"], row["image"], row["reason"] or unknown or long))
        return make_examples(self.settings, samples, split, found)

    def _rows(self, split: str | None) -> list[dict[str, str]]:
        """Return the rows of a split, or those to train on if it is None."""
        if not self.settings.train:
            raise ValueError("task.train is not set; give --task.train FILE, a CSV with the columns image, text, label")
        rows = self._read(self.settings.train if split in (None, HELD_OUT) else split)
        if split != HELD_OUT and (split or self.settings.validate_on != HELD_OUT):
            return rows
        images = sorted({row["image"] for row in rows}, key=lambda name: hashlib.sha256(name.encode()).digest())
        held_out = {*images[: max(1, len(images) // 10)]}
        return [row for row in rows if (row["image"] in held_out) == (split == HELD_OUT)]

    def _read(self, name: str) -> list[dict[str, str]]:
        """Return the rows of a CSV file with their place in it, and with the reason why a row is unusable."""
        file, rows = Path(self.settings.folder, name), []
        text = read_text(file, "task.train or task.folder")
        delimiter = max(",;\t", key=text.partition("\n")[0].count)
        reader = csv.DictReader(io.StringIO(text, newline=""), restval="", delimiter=delimiter)
        try:
            if missing := {"image", "text", "label"} - {*(reader.fieldnames or ())}:
                raise ValueError(f"{file} has no column {min(missing)}; its first line must name image, text and label")
            for row in reader:
                label, place = row["label"].strip(), f"{name}:{reader.line_num}"
                reason = f"it has more cells than columns; quote texts with {delimiter!r}" if None in row else ""
                if not reason and not _is_valid(label, self.settings.label):
                    reason = f"its label is {short_repr(label)}, not {self.settings.label} (task.label)"
                image = image_name(row["image"])
                rows.append({"image": image, "text": row["text"], "label": label, "place": place, "reason": reason})
        except csv.Error as error:
            raise ValueError(f"{file}:{reader.line_num} is not CSV: {error}; correct the row's quotes") from error
        return rows

    def _split(self, label: str) -> list[str]:
        return [one.strip() for one in label.split("|") if one.strip()] if self.settings.label == "several" else [label]

    def annotation_for(self, text: str) -> dict[str, str | None]:
        return {"text": text, "label": None}

    def example(self, sample: Sample, image: PreparedImage, annotation: dict, rng: np.random.Generator) -> Example:
        words = self.vocabulary.encode(annotation["text"])[: self.settings.text_length]
        tokens, label = [self.vocabulary.cls, *words, self.vocabulary.sep], annotation["label"]
        target = [] if label is None else [self._target(label)]
        labels = {"label": np.array(target, np.float32).reshape(len(target), self.outputs)}
        at_cls = {"label": (np.arange(len(tokens)) == 0) & bool(target)}
        text = TextInput.of_one_sentence(tokens, label_masks=at_cls, labels=labels)
        return Example(sample.key, text, image.to_input(), {"question": annotation["text"], "ground_truth": label})

    def _target(self, label: str) -> list[float]:
        """Return the right outputs: 1 for each class of the label, or a number in units of the standard deviation."""
        if self.settings.label == "number":
            return [(float(label) - self.labels[0]) / self.labels[1]]
        return [float(name in self._split(label)) for name in self.labels]

    def head(self, config: ModelConfig) -> nn.Module:
        self.settings.fit(config)  # a model without a recipe has not been checked
        return Classifier(config, self.outputs, kind="words", dropout=0.1)

    def losses(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        outputs = head(select(encoded.text, batch.labelled["label"])).float()
        losses = {"one": F.cross_entropy, "several": F.binary_cross_entropy_with_logits, "number": F.mse_loss}
        return {"label": (losses[self.settings.label](outputs, batch.labels["label"], reduction="sum"), len(outputs))}

    def predictions(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> list[dict]:
        outputs, rows = head(encoded.text[:, 0]).float(), []
        probabilities = outputs.softmax(1) if self.settings.label == "one" else outputs.sigmoid()
        for i, (key, metadata) in enumerate(zip(batch.keys, batch.metadata, strict=True)):
            if self.settings.label == "number":
                answer, probability = f"{self.labels[0] + self.labels[1] * float(outputs[i]):.6g}", None
                pairs = [(answer, probability)]
            else:
                pairs = sorted(zip(self.labels, probabilities[i].tolist(), strict=True), key=lambda pair: -pair[1])
                answer, probability = pairs[0]
                if self.settings.label == "several":
                    answer = "|".join(name for name, p in pairs if p > 0.5)
                    probability = math.prod(max(p, 1 - p) for _, p in pairs)
            ranking = [{"answer": name, "probability": p} for name, p in pairs[:_MAX_RANKED]]
            score = None if metadata["ground_truth"] is None else self._score(answer, metadata["ground_truth"])
            own = {"answer": answer, "probability": probability, "ranking": ranking, "score": score, "boxes": []}
            rows.append({"key": key, **metadata, **own})
        return rows

    def _score(self, answer: str, truth: str) -> float:
        """Return the F1 of the answer's labels. For a number: 1 - its error in standard deviations, at least 0."""
        if self.settings.label == "number":
            return max(0.0, 1 - abs(float(answer) - float(truth)) / self.labels[1])
        found, right = {*self._split(answer)}, {*self._split(truth)}
        return 2 * len(found & right) / (len(found) + len(right)) if found or right else 1.0

    def metrics(self, rows: Sequence[dict]) -> dict[str, float]:
        rows = [row for row in rows if row["ground_truth"] is not None]
        if not rows:
            return {}
        if self.settings.label == "number":
            truth, found = (np.array([float(row[name]) for row in rows]) for name in ("ground_truth", "answer"))
            unexplained = float(((truth - found) ** 2).mean())
            return {"r2": 1 - unexplained / (float(truth.var()) or math.nan), "rmse": unexplained**0.5}
        ((commonest, _),) = Counter(row["ground_truth"] for row in rows).most_common(1)
        chance = sum(self._score(commonest, row["ground_truth"]) for row in rows) / len(rows)
        return {self.best_metric(self.settings): sum(row["score"] for row in rows) / len(rows), "chance": chance}


def _is_valid(label: str, kind: str) -> bool:
    """Return whether a cell holds a label of this kind: any labels, or none, for `several`."""
    with contextlib.suppress(ValueError):
        return kind == "several" or bool(label) and (kind == "one" or math.isfinite(float(label)))
    return False
