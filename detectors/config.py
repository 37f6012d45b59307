"""Every setting of detection: which detector, and how it runs. `vlbert detect` and the flows take them.

Without torch: a flow reads its parameters before any network is needed.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from detectors.select import SelectionSettings
from storage.settings import FORM, changed_fields, check, check_choices


@dataclass(frozen=True)
class NetworkOverrides:
    """Fields of detectors.faster_rcnn.FasterRCNNConfig to be other than the preset or the weight file says; none: as it
    says."""

    __pydantic_config__ = FORM

    short_side: int | None = None
    """Pixels of the resized image's shorter side."""
    long_side: int | None = None
    """Pixels that its longer side may have."""
    post_nms: int | None = None
    """Proposals an image, at most."""

    def __post_init__(self):
        for name in ("short_side", "long_side", "post_nms"):
            value = getattr(self, name)
            check(self, value is None or value >= 1, name, "at least 1")


@dataclass(frozen=True)
class ImportedFeatures:
    """Files of boxes and features that another project has computed (docs/detector.md)."""

    __pydantic_config__ = FORM

    files: tuple[str, ...] = ()
    """Each a TSV, an LMDB, an HDF5 file, or a zip or folder of JSON or .npz files. All of them are one detector: give
    the same list for all datasets of a training."""
    match: Literal["file_name", "number", "url", "key"] = "file_name"
    """What a row's image id is compared with: `file_name`, that of the image's URL, without folder and extension;
    `number`, the number at its end, as 391895 of COCO_val2014_000000391895.jpg; `url`, the URL; `key`, the sample's
    key."""
    background: Literal["first", "last", "none"] = "first"
    """Which of the class probabilities is the background's: `first` in Caffe's files, `last` in detectron2's; `none`,
    it is what the others leave to 1."""
    num_classes: int | None = None
    """For files that give the class of a region (objects_id) and no probabilities: the number of classes, without the
    background. Each region then has the probability 1 in its class, as annotated boxes have; none: no class_probs, as
    masked regions of pre-training need them."""

    def __post_init__(self):
        check_choices(self)
        check(self, self.num_classes is None or self.num_classes >= 1, "num_classes", "at least 1")


@dataclass(frozen=True)
class DetectorChoice:
    """Which detector."""

    backend: Literal["annotated", "imported", "faster_rcnn", "detectron2"] = "faster_rcnn"
    """Where regions come from: `annotated`, an annotation file; `imported`, files of features; `faster_rcnn`, our
    network; `detectron2`, the same network in detectron2."""
    weights: str | None = None
    """Safetensors file of the network."""
    preset: Literal["vg_resnet101", "vg_resnet50", "demo"] | None = None
    """The network, of detectors.faster_rcnn.PRESETS; needed only where the weights do not say which."""
    random_init: bool = False
    """Random weights in place of a file, for trials; needs `preset`."""
    network: NetworkOverrides = NetworkOverrides()
    """What differs from the preset or the weight file."""
    annotations: str | None = None
    """File in COCO's detection format, for backend `annotated`; crowds are skipped."""
    imported: ImportedFeatures = ImportedFeatures()
    """The files of backend `imported`."""


@dataclass(frozen=True)
class DetectorSettings:
    """How the network is run over images."""

    selection: SelectionSettings = field(default_factory=SelectionSettings)
    """Which proposals become regions."""
    boxes: Literal["proposals", "regressed"] = "proposals"
    """A region's box: `proposals`, the RPN's own, as in the authors' files; `regressed`, where the box head moves it
    for the region's class, as Faster R-CNN's detections are. With `regressed` only the boxes change: the selection, its
    order, probabilities and features are those of the proposals, so that boxes may overlap more than the selection
    allows; one without any area inside the image keeps its proposal's box."""
    keep_features: bool = False
    """Store the features [N, D] of the regions, too, in float16: 2 D bytes a region."""
    device: str = "cpu"
    """`cpu`, `cuda`, or one of several as `cuda:1`."""
    precision: Literal["fp32", "bf16-res5"] = "fp32"
    """`fp32`: float32 throughout; `bf16-res5`: res5 in bfloat16, for speed. Backbone and RPN stay in float32."""
    batch: int = 1
    """Images that go through the backbone together, all of one resized size: nothing is padded, which would change
    features near the border. On a GPU, 8 keep it busy."""

    def __post_init__(self):
        check_choices(self)
        check(self, self.batch >= 1, "batch", "at least 1")
        check(self, self.device_type in ("cpu", "cuda"), "device", "cpu, cuda or such as cuda:1")

    @property
    def device_type(self) -> str:
        """The device without its number."""
        return self.device.partition(":")[0]


@dataclass(frozen=True)
class DetectionConfig(DetectorSettings, DetectorChoice):
    """One detection: which detector finds regions, and how it runs over the images."""

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
            raise ValueError(f"{', '.join(foreign)}: not for backend {self.backend}; leave out")
        if self.backend == "imported" and not self.imported.files:
            raise ValueError("imported.files is not set: backend imported needs files of features")
        if self.backend == "annotated" and not self.annotations:
            raise ValueError("annotations is not set: backend annotated needs a file in COCO's detection format")
        if self.backend not in files and bool(self.weights) == self.random_init:
            raise ValueError(
                f"weights is {self.weights!r} and random_init {self.random_init}: backend {self.backend} needs weights "
                "(a safetensors file) or, for a trial on random ones, random_init; not both"
            )
        if self.random_init and not self.preset:
            raise ValueError(
                "preset is not set: random_init needs one, the network that gets random weights: vg_resnet101, "
                "vg_resnet50 or demo"
            )

    @property
    def network_overrides(self) -> dict[str, object]:
        """The fields of `network` that are set, by name."""
        return {name: value for name, value in dataclasses.asdict(self.network).items() if value is not None}


@dataclass(frozen=True)
class AnnotationConfig:
    """The annotated images that a detector learns from, in COCO's detection format (`annotations`) or Visual Genome's
    (`objects`)."""

    __pydantic_config__ = FORM

    annotations: str | None = None
    """COCO's detection format; its categories, sorted by id, are the classes."""
    objects: str | None = None
    """Visual Genome's scene_graphs.json, which has the objects with their attributes, or its objects.json."""
    images: tuple[str, ...] = ()
    """Folders that hold the image files."""
    classes: str | None = None
    """Names of the classes, one a line, synonyms between commas (objects_vocab.txt)."""
    attribute_names: str | None = None
    """The same of the attributes (attributes_vocab.txt)."""
    train_list: str | None = None
    """Images to train on, the path of a file in each line; none: all that are not held out."""
    held_out_list: str | None = None
    """Images of validation, listed like that."""
    held_out_last: int = 0
    """Instead of a list: so many images of the highest ids."""

    def __post_init__(self):
        check_choices(self)
        check(self, self.held_out_last >= 0, "held_out_last", "0 or more")
        check(self, not (self.held_out_last and self.held_out_list), "held_out_last", "0 where held_out_list is given")
