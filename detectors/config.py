"""Settings of `vlbert detect` and of the flows: which detector to use, and how to run it.

This module does not import torch, because flows use these settings before they need a network.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from detectors.select import SelectionSettings
from storage.settings import FORM, changed_fields, check, check_choices


@dataclass(frozen=True)
class NetworkOverrides:
    """Values that replace fields of the preset's or the weight file's FasterRCNNConfig. None means no change."""

    __pydantic_config__ = FORM

    short_side: int | None = None
    """Length of the resized image's shorter side, in pixels."""
    long_side: int | None = None
    """Maximum length of the resized image's longer side, in pixels."""
    post_nms: int | None = None
    """Maximum number of proposals per image, after NMS."""

    def __post_init__(self):
        for name in ("short_side", "long_side", "post_nms"):
            value = getattr(self, name)
            check(self, value is None or value >= 1, name, "at least 1")


@dataclass(frozen=True)
class ImportedFeatures:
    """Files of boxes and features computed by another project (docs/detector.md)."""

    __pydantic_config__ = FORM

    files: tuple[str, ...] = ()
    """TSV, LMDB or HDF5 files, or zips or folders of JSON or .npz files. Together they are one detector: give the same
    list for all datasets of a training run."""
    match: Literal["file_name", "number", "url", "key"] = "file_name"
    """Property of a sample that must equal the image id of a row: `file_name`, the file name in the image's URL,
    without folder and extension; `number`, the number at its end, such as 391895 of COCO_val2014_000000391895.jpg;
    `url`, the URL; `key`, the sample's key."""
    background: Literal["first", "last", "none"] = "first"
    """Column of the background among the class probabilities: `first` in Caffe's files, `last` in detectron2's. With
    `none`, no column is the background, and its probability is 1 minus the sum of the columns."""
    num_classes: int | None = None
    """Number of classes without the background, for files that have the class of each region (objects_id) but no
    probabilities: each region gets probability 1 for its class, as annotated boxes do. If this is not set, no
    class_probs are stored, which pre-training needs for its masked regions."""

    def __post_init__(self):
        check_choices(self)
        check(self, self.num_classes is None or self.num_classes >= 1, "num_classes", "at least 1")


@dataclass(frozen=True)
class DetectorChoice:
    """Settings that choose the detector and its files."""

    backend: Literal["annotated", "imported", "faster_rcnn", "detectron2"] = "faster_rcnn"
    """Source of the regions: `annotated`, an annotation file; `imported`, feature files; `faster_rcnn`, our network;
    `detectron2`, the same network in detectron2."""
    weights: str | None = None
    """Safetensors file with the weights of the network."""
    preset: Literal["vg_resnet101", "vg_resnet50", "demo"] | None = None
    """A network of detectors.faster_rcnn.PRESETS; needed only if the weight file does not describe its network."""
    random_init: bool = False
    """Use random weights instead of a weight file, for trials. Requires `preset`."""
    network: NetworkOverrides = NetworkOverrides()
    """Settings that replace those of the preset or the weight file."""
    annotations: str | None = None
    """File in COCO's detection format, for backend `annotated`. Boxes around many objects (iscrowd) are skipped."""
    imported: ImportedFeatures = ImportedFeatures()
    """Files for backend `imported`."""


@dataclass(frozen=True)
class DetectorSettings:
    """Settings for running the network over images."""

    selection: SelectionSettings = field(default_factory=SelectionSettings)
    """Rule that selects regions from the proposals."""
    boxes: Literal["proposals", "regressed"] = "proposals"
    """Box that is stored for a region: `proposals`, the RPN's box, as in the authors' files; `regressed`, the box after
    the box head's regression for the region's class, as in Faster R-CNN's detections. With `regressed`, only the boxes
    change: selection, order, probabilities and features are still those of the proposals, so boxes may overlap more
    than the selection allows. A regressed box without area inside the image is replaced by its proposal."""
    keep_features: bool = False
    """Also store the regions' features [N, D] in float16, 2 D bytes per region."""
    device: str = "auto"
    """`cpu`, `cuda`, or one of several GPUs, such as `cuda:1`. `auto`: a GPU if there is one, else the CPU."""
    precision: Literal["fp32", "bf16-res5"] = "fp32"
    """`fp32`: float32 throughout; `bf16-res5`: only res5 in bfloat16, for speed, on the `device` that must be set."""
    batch: int | None = None
    """Number of images in a backbone batch. Only images of the same resized size share a batch, because padding would
    change features near the border. By default 8 on a GPU and 1 on a CPU."""

    def __post_init__(self):
        check_choices(self)
        check(self, self.batch is None or self.batch >= 1, "batch", "at least 1")
        check(self, self.device_type in ("auto", "cpu", "cuda"), "device", "auto, cpu, cuda, or one GPU such as cuda:1")
        check(self, self.precision == "fp32" or self.device != "auto", "device", "cpu or cuda with bf16-res5")

    @property
    def device_type(self) -> str:
        """Type of the device without its index: `cpu`, `cuda` or `auto`."""
        return self.device.partition(":")[0]


@dataclass(frozen=True)
class DetectionConfig(DetectorSettings, DetectorChoice):
    """Settings of a detection run: the detector, and how it runs over the images."""

    __pydantic_config__ = FORM

    def __post_init__(self):
        super().__post_init__()
        files = {"annotated": ("annotations",), "imported": ("imported.", "keep_features")}
        changed = [name for name in changed_fields(self) if name != "backend"]
        if self.backend in files:
            foreign = [name for name in changed if not name.startswith(files[self.backend])]
        else:
            foreign = [name for name in changed if name.startswith(("annotations", "imported."))]
        if foreign:
            raise ValueError(f"{', '.join(foreign)}: backend {self.backend} does not use these settings; remove them")
        if self.backend == "imported" and not self.imported.files:
            raise ValueError("imported.files is not set: backend imported needs feature files")
        if self.backend == "annotated" and not self.annotations:
            raise ValueError("annotations is not set: backend annotated needs a file in COCO's detection format")
        if self.backend not in files and bool(self.weights) == self.random_init:
            raise ValueError(
                f"weights is {self.weights!r} and random_init is {self.random_init}: backend {self.backend} needs "
                "either weights (a safetensors file) or random_init (random weights, for a trial)"
            )
        if self.random_init and not self.preset:
            raise ValueError(
                "preset is not set: random_init needs a network to initialise; set preset to vg_resnet101, vg_resnet50 "
                "or demo"
            )

    @property
    def network_overrides(self) -> dict[str, object]:
        """The fields of `network` that are not None, by name."""
        return {name: value for name, value in dataclasses.asdict(self.network).items() if value is not None}


@dataclass(frozen=True)
class AnnotationConfig:
    """Annotated images to train on, in COCO's detection format (`annotations`) or Visual Genome's (`objects`)."""

    __pydantic_config__ = FORM

    annotations: str | None = None
    """File in COCO's detection format; its categories, sorted by id, are the classes unless `classes` is set."""
    objects: str | None = None
    """Visual Genome's scene_graphs.json (objects with attributes) or objects.json."""
    images: tuple[str, ...] = ()
    """Folders with the image files."""
    classes: str | None = None
    """File of class names, one class per line, synonyms separated by commas (objects_vocab.txt)."""
    attribute_names: str | None = None
    """File of attribute names in the same format (attributes_vocab.txt)."""
    train_list: str | None = None
    """File that lists the images to train on, one path per line. By default, all images that are not held out."""
    held_out_list: str | None = None
    """File that lists the validation images, one path per line."""
    held_out_last: int = 0
    """Number of images to hold out, those with the highest ids; an alternative to held_out_list."""

    def __post_init__(self):
        check_choices(self)
        check(self, self.held_out_last >= 0, "held_out_last", "0 or more")
        check(self, not (self.held_out_last and self.held_out_list), "held_out_last", "0 if held_out_list is set")
