"""VLBertProcessor, which makes model inputs from images, texts and boxes in the same way as training."""

import functools
import io
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image, ImageOps
from tokenizers import Tokenizer
from transformers import BatchFeature, PreTrainedTokenizerBase, PreTrainedTokenizerFast, ProcessorMixin

from detectors.detect import FasterRCNNDetector
from detectors.image_file import AnyImage, detect_regions, from_array, read_image
from storage.collect.normalise import FILE_FORMATS
from storage.safe_json import parse_json
from storage.sample import Regions, Sample, sample_key
from vlbert.checkpoint import CONFIG, DETECTOR, VOCABULARY
from vlbert.data.batch import Example, collate
from vlbert.data.images import prepare_image
from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.hf.config import IGNORED, VLBertConfig
from vlbert.hf.files import HUB, PROCESSOR, fetch_folder
from vlbert.hf.inputs import from_batch, in_fractions
from vlbert.predict.predictor import load_detector
from vlbert.tasks import make_task
from vlbert.tasks.base import Task, user_annotation
from vlbert.tasks.pretraining import MaskedInput, Pretraining, PretrainingSettings

OneImage = AnyImage | Sample
_ANY_TEXT = PretrainingSettings(max_elements=None)  # inputs of a model without a task: [CLS] text [SEP], all regions


class VLBertProcessor(ProcessorMixin):
    """A processor that makes a model's inputs from images, texts and boxes.

        processor = VLBertProcessor.from_pretrained("ROOT/runs/pretrain")
        inputs = processor(images="photo.jpg", text="a red [MASK]")                                  # finds regions
        inputs = processor(images=image, text="a red [MASK]", boxes=[[20, 30, 120, 140]])            # your regions
        inputs = processor(text=text, boxes=boxes, visual_embeds=features, image_sizes=(480, 640))   # your features

    The text is put into the form that the config's task needs, such as [CLS] question [SEP] [MASK] [SEP].

    Args:
        tokenizer: Tokenizer with the model's vocabulary. Raises ValueError if its size is not the config's vocab_size.
        detector: Weight file of the detector. It is needed only to find the regions of images without boxes.
    """

    attributes = ["tokenizer"]
    tokenizer_class = "AutoTokenizer"

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, config: VLBertConfig, detector: str | os.PathLike | None = None
    ):
        super().__init__(tokenizer)
        self.config = config
        tokenizer.model_max_length = config.model_config.max_tokens
        self.detector_file = None if detector is None else Path(detector)
        ids = tokenizer.get_vocab()
        self.vocabulary = Vocabulary(sorted(ids, key=ids.__getitem__), source="the tokenizer")
        if len(self.vocabulary) != config.vocab_size:
            raise ValueError(
                f"the tokenizer has {len(self.vocabulary)} tokens, but the model has {config.vocab_size}; use its own"
            )

    @functools.cached_property
    def task(self) -> Task:
        """The config's task, which determines the form of the inputs. It is pre-training if the config has no task."""
        settings = self.config.task_settings or _ANY_TEXT.fit(self.config.model_config)
        return make_task(settings, self.vocabulary, self.config.num_classes)

    @functools.cached_property
    def detector(self) -> FasterRCNNDetector:
        """The detector whose regions the model was trained on. Raises ValueError if its weights are not found."""
        return load_detector(self.config.to_dict(), self.config.name_or_path or "the model", self.detector_file)

    def __call__(  # noqa: PLR0913  the inputs of all tasks
        self,
        images: OneImage | Sequence[OneImage] | None = None,
        text: str | Sequence[str] | None = None,
        boxes: Sequence | np.ndarray | None = None,
        visual_embeds: Sequence | np.ndarray | None = None,
        image_sizes: Sequence[tuple[int, int]] | None = None,
        choices: Sequence | None = None,
        answer: str | Sequence[str] = "",
        mask_regions: Sequence = (),
        normalized: bool = False,
        return_tensors: str | None = "pt",
        padding: bool | str = True,
        truncation: bool = False,
        max_length: int | None = None,
    ) -> BatchFeature:
        """Return padded model inputs for texts and their images, named as in vlbert/hf/inputs.py.

        Raises ValueError if an image cannot be read, or if an argument is given that the task does not take.

        Args:
            images: File paths, bytes, Pillow images, arrays, tensors (read_image) or `Predictor.detect`'s samples; None
                if there are only features.
            text: One text or a list. With a list, each of the other arguments is a list with one entry per text.
            boxes: Boxes of each image, float [n, 4], x1 y1 x2 y2 in pixels of the given image. By default, the
                detector finds them.
            visual_embeds: Features of each image's boxes, float [n, D], if the model reads features. They are rounded
                to float16, like the features that a detector stores.
            image_sizes: (height, width) of each image, if there are features and no images.
            choices: VCR: the four choices. If they are rationales, `answer` is the answer that they explain.
            mask_regions: Pre-training: the regions to mask, counted from 1.
            padding: True or "longest": to the longest text; "max_length": to `max_length`.
            truncation: Cut the end of a text that is too long. By default, it is an error.
            max_length: Maximum tokens of a text with its special tokens; by default, what the model reads.
            normalized: Boxes are fractions of the image's width and height instead of pixels.
        """
        if return_tensors not in ("pt", None) or padding not in (True, "longest", "max_length"):
            raise ValueError("the processor makes padded torch tensors: return_tensors='pt' and padding=True")
        most = self.tokenizer.model_max_length
        if max_length is not None and not 1 <= max_length <= most:
            raise ValueError(f"max_length is {max_length}; the model reads 1 to {most} tokens")
        if text is None or text in ([], ()):
            raise ValueError("text is missing; a model reads a text with each image")
        given: dict[str, Any] = {"images": images, "boxes": boxes}
        given |= {"visual_embeds": visual_embeds, "image_sizes": image_sizes}
        given |= {"choices": choices, "answer": answer or None, "mask_regions": mask_regions or None}
        given = {name: values for name, values in given.items() if values is not None}
        if isinstance(text, str):
            text, given = [text], {name: [values] for name, values in given.items()}
        if wrong := [entry for entry in text if not isinstance(entry, str)]:
            raise ValueError(f"text is {wrong[0]!r}; it must be a string, or a list of strings")
        if wrong := [f"{len(values)} {name}" for name, values in given.items() if len(values) != len(text)]:
            raise ValueError(f"there are {len(text)} texts and {', '.join(wrong)}; each text needs one")
        arguments = [{name: values[i] for name, values in given.items()} for i in range(len(text))]
        pairs = zip(text, arguments, strict=True)
        cut = functools.partial(self._cut, truncation=truncation, most=max_length or most)
        examples = [self._make_example(entry, cut, normalized=normalized, **of_text) for entry, of_text in pairs]
        width = (max_length or most) if padding == "max_length" else 0
        return BatchFeature(from_batch(collate(examples, least=(width, 0))))

    def _cut(self, text: str, regions: int, truncation: bool, most: int) -> str:
        """Return `text`, cut if its row would have more than `most` tokens or the task reads less of it.

        Raises ValueError if a text must be cut, but `truncation` is False.
        """
        tokens, lengths = self.vocabulary.tokenizer.encode(text, add_special_tokens=False), self.task.settings.lengths()
        specials = max([2, *(others - 2 for others in lengths.values())])
        limit = max(1, min(most - specials, self.task.text_limit(len(tokens), regions)))
        if len(tokens) <= limit:
            return text
        if not truncation:
            raise ValueError(f"the text has {len(tokens)} tokens, but {limit} fit; shorten it, or set truncation=True")
        return text[: tokens.offsets[limit - 1][1]]

    def _make_example(  # noqa: PLR0913  one text's part of the arguments of __call__
        self,
        text: str,
        cut: Callable[[str, int], str],
        images: OneImage | None = None,
        boxes: Any = None,
        visual_embeds: Any = None,
        image_sizes: tuple[int, int] | None = None,
        choices: Sequence[str] = (),
        answer: str = "",
        mask_regions: Sequence[int] = (),
        normalized: bool = False,
    ) -> Example:
        if images is None and visual_embeds is None:
            raise ValueError("images are missing; use `processor.tokenizer` for text-only inputs")
        sample = self._make_sample(images, boxes, visual_embeds, image_sizes, normalized)
        text = cut(text, len(sample.require_regions()))
        if isinstance(self.task, Pretraining) and not (choices or answer):  # annotation_for needs something to predict
            annotation = MaskedInput(text, tuple(sorted({*mask_regions})))
        else:
            annotation = user_annotation(self.task, text, choices=choices, answer=answer, mask_regions=mask_regions)
        prepared = prepare_image(sample, self.config.model_config.regions, flip=False)
        return self.task.example(sample, prepared, annotation, np.random.default_rng(0))

    def _make_sample(
        self, image: OneImage | None, boxes: Any, visual_embeds: Any, size: tuple[int, int] | None, normalized: bool
    ) -> Sample:
        """Make a sample with the given or detected regions. `size` (height, width) is needed if `image` is None."""
        if visual_embeds is not None and self.config.model_config.regions.features != "precomputed":
            raise ValueError("the model reads pixels, not visual_embeds")
        if visual_embeds is not None and boxes is None:
            raise ValueError("visual_embeds need boxes, one per vector")
        if image is None:
            if size is None:
                raise ValueError("visual_embeds need images, or image_sizes: (height, width) of each")
            height, width = size
            sample = Sample(sample_key("", ""), b"", "", "", int(width), int(height), "")
        elif isinstance(image, Sample):
            sample = image
        else:
            if not isinstance(image, AnyImage):
                kind = type(image).__name__
                raise ValueError(f"an image is a {kind}; give file paths, bytes, Pillow images, arrays or tensors")
            if not isinstance(image, str | Path | bytes | Image.Image):
                image = from_array(image)
            sample = read_image(image)
        if boxes is None:
            return sample if sample.regions is not None else detect_regions(sample, self.detector)
        stored = sample.width, sample.height
        given = stored if image is None or isinstance(image, Sample) else _upright_size(image)
        size = (1, 1) if normalized else given
        boxes = _check_boxes(np.asarray(boxes, np.float64), size) * np.array(stored * 2) / (size * 2)
        features = None if visual_embeds is None else np.asarray(visual_embeds, np.float16)
        return _add_boxes(sample, boxes.astype(np.float32), features, self.config.num_classes)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of processor_config.json."""
        return {"processor_class": type(self).__name__, "config": self.config.to_diff_dict()}

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> list[str]:
        """Write processor_config.json, the tokenizer, vocab.txt and, if the file exists, the detector's weights."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / VOCABULARY).write_text(self.vocabulary.text(), encoding="utf-8")
        file = self.detector_file
        if file is not None and file.is_file() and file.resolve() != (folder / DETECTOR).resolve():
            shutil.copyfile(file, folder / DETECTOR)
        return super().save_pretrained(str(folder), push_to_hub, **kwargs)

    @classmethod
    def from_pretrained(  # ty: ignore[incompatible-method-override] by name only
        cls, pretrained_model_name_or_path: str | os.PathLike, detector: str | os.PathLike | None = None, **kwargs: Any
    ) -> Self:
        """Load the processor of a model. The model can be a folder, a run, a checkpoint, or a name on the Hub.

        Only files in the model's folder are read. Raises OSError if a folder is missing or has no vocabulary.

        Args:
            detector: The detector's weight file, if it is not in the folder as detector.safetensors.
            kwargs: `revision`, `cache_dir`, `force_download`, `local_files_only` and `token` of `snapshot_download`.
        """
        hub = {name: value for name, value in kwargs.items() if name not in IGNORED and name[0] != "_"}
        folder = Path(fetch_folder(pretrained_model_name_or_path, (CONFIG, VOCABULARY, PROCESSOR, DETECTOR), **hub))
        if not (folder / VOCABULARY).is_file():
            raise OSError(f"{folder} has no {VOCABULARY}; put the model's own there, one token a line")
        file = folder / (PROCESSOR if (folder / PROCESSOR).is_file() else CONFIG)
        values = parse_json(file.read_bytes(), str(file))
        config = VLBertConfig.from_dict(values.get("config", values), name_or_path=str(folder))
        if detector is None and (folder / DETECTOR).is_file():
            detector = folder / DETECTOR
        return cls(make_tokenizer(Vocabulary.read(folder / VOCABULARY)), config, detector)


def _check_boxes(boxes: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return the boxes as [n, 4]. Raises ValueError if their shape or a coordinate is invalid.

    `size` is the (width, height) of the image, or (1, 1) if the boxes are fractions of it.
    """
    boxes = boxes.reshape(0, 4) if not boxes.size else boxes
    if boxes.ndim != 2 or boxes.shape[1] != 4:
        raise ValueError(f"the boxes of an image are {list(boxes.shape)}; they must be [n, 4]: x1 y1 x2 y2")
    wrong = ~(np.isfinite(boxes).all(axis=1) & (boxes[:, 2:] >= boxes[:, :2]).all(axis=1))
    if wrong.any():
        raise ValueError(f"box {wrong.argmax()} is {boxes[wrong.argmax()].tolist()}; x1 <= x2 and y1 <= y2 must hold")
    if in_fractions(boxes, max(size)):
        raise ValueError("the boxes are fractions of the image; give pixels, or set normalized=True")
    if size == (1, 1) and boxes.size and boxes.max() >= 2:
        raise ValueError(f"normalized is True, but the boxes reach {boxes.max():g}; give fractions of the image")
    return boxes


class VLBertTokenizer(PreTrainedTokenizerFast):
    """The tokenizer of a folder, a run or a Hub model, for AutoTokenizer. Its limit is what the model reads."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike, *inputs: Any, **kwargs: Any
    ) -> PreTrainedTokenizerFast:
        """Load the tokenizer. Of `kwargs`, only those of `fetch_folder` are read."""
        hub = {name: kwargs[name] for name in HUB & kwargs.keys()}
        folder = fetch_folder(pretrained_model_name_or_path, (CONFIG, VOCABULARY), **hub)
        tokenizer = make_tokenizer(Vocabulary.read(Path(folder, VOCABULARY)))
        values, _ = VLBertConfig.get_config_dict(folder)
        tokenizer.model_max_length = VLBertConfig.from_dict(values).model_config.max_tokens
        return tokenizer


def make_tokenizer(vocabulary: Vocabulary) -> PreTrainedTokenizerFast:
    """Wrap a vocabulary's tokenizer as a transformers tokenizer."""
    names = dict(zip(("pad", "unk", "cls", "sep", "mask"), SPECIALS, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(vocabulary.tokenizer.to_str()),
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{f"{name}_token": token for name, token in names.items()},
    )


def _upright_size(image: str | Path | bytes | Image.Image) -> tuple[int, int]:
    """Return the (width, height) of an image after it is rotated as its EXIF data says."""
    if not isinstance(image, Image.Image):
        image = Image.open(io.BytesIO(image) if isinstance(image, bytes) else image, formats=FILE_FORMATS)
    return ImageOps.exif_transpose(image).size


def _add_boxes(sample: Sample, boxes: np.ndarray, features: np.ndarray | None, num_classes: int) -> Sample:
    """Return the sample with the boxes, float32 [n, 4], as its regions. Their class probabilities are zero."""
    nothing = np.zeros((len(boxes), 1 + num_classes), np.float16)
    regions = Regions(
        boxes,
        scores=np.ones(len(boxes), np.float32),
        labels=np.ones(len(boxes), np.int32),
        detector="given",
        class_probs=nothing,
        features=features,
    )
    return replace(sample, regions=regions)
