"""The settings of a run, as frozen dataclasses that check their values on construction."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from detectors.resnet import ResNetConfig
from storage.settings import Weights, check, check_choices, check_positive, flat, to_json
from training.optimizer import OptimizerConfig, check_decay
from training.recipe import RunSettings


@dataclass(frozen=True)
class RegionConfig:
    """Settings of the appearance features, one vector per region (vlbert/model/fast_rcnn.py)."""

    # end_to_end: a Fast R-CNN trained with the model (paper 3.2, 3.3); precomputed: float16 vectors in the shards
    features: Literal["end_to_end", "precomputed"] = "end_to_end"
    resnet: ResNetConfig = ResNetConfig(stem_pool="torch")  # ResNet-101; the authors pad its first pooling layer
    short_side: int = 600  # pixels; images are resized until the short side has this length ...
    long_side: int = 1000  # ... or the long side has this one, whichever gives the smaller image
    roi_size: int = 14  # RoIAlign returns roi_size x roi_size cells per region
    frozen_stages: int = 2  # first stages that are not trained, 0 to 5; 2: conv1 and res2, as in the authors' code
    weights: str | None = None  # safetensors file of a detector whose ResNet initialises backbone and res5
    random_init: bool = False  # start from random weights; a run without any weights is refused unless this is true
    pixel_mean: tuple[float, float, float] = (102.9801, 115.9465, 122.7717)  # B, G, R, 0 to 255, as in the VG detector
    pixel_std: float = 1.0  # pixels are divided by it after the mean is subtracted
    # pixels: a masked region loses its pixels (paper 3.3). features: a learned vector replaces the region's own, but
    # overlapping regions still show its pixels. Precomputed features are always masked as with `features`.
    masking: Literal["pixels", "features"] = "pixels"
    masked_features: Literal["learned", "zeros"] = "learned"  # vector of a masked region: learned, initially 0; or 0
    masked_pixels: Literal["mean", "black"] = "mean"  # value of masked pixels: pixel_mean, or 0 before it is subtracted
    # How images of different sizes are padded with zeros. groups: each batch has at most two groups of similar shapes,
    # each padded to its largest height and width. batch: all images to the largest of the batch, as in the authors'
    # code. fixed: each to short_side x long_side (portrait: long_side x short_side), as in the authors' VCR. Features
    # near an image's right and lower border depend on this.
    padding: Literal["groups", "batch", "fixed"] = "groups"
    exact_boxes: ClassVar[bool] = False  # as in VL-BERT's code: boxes are clipped to the resized image's last pixel

    def __post_init__(self):
        check_choices(self)
        check(self, 0 <= self.frozen_stages <= 5, "frozen_stages", "0 to 5")
        check(self, 0 < self.short_side <= self.long_side, "short_side", "at most long_side")
        check_positive(self, "roi_size", "pixel_std")
        check(self, len(self.pixel_mean) == 3, "pixel_mean", "three numbers, of blue, green and red")
        check(self, not (self.weights and self.random_init), "random_init", "false if weights are given")
        check(self, self.features == "end_to_end" or not self.weights, "weights", "None if features are precomputed")

    @property
    def channels(self) -> int:
        """Width D of a region's feature vector."""
        return self.resnet.res5_channels

    @property
    def live_norms(self) -> bool:
        """True if the ResNet has BatchNorms that normalise over the images of a batch."""
        return self.features == "end_to_end" and self.resnet.norm == "batch" and self.frozen_stages < 5

    @property
    def masks_features(self) -> bool:
        """True if masking replaces a region's vector instead of its pixels."""
        return self.features == "precomputed" or self.masking == "features"


class ExactRegionConfig(RegionConfig):
    """The RegionConfig of a model with the separate embedding; ModelConfig converts to it.

    Boxes are not clipped. With precomputed features, they are in pixels of the stored image.
    """

    exact_boxes: ClassVar[bool] = True


TASK_TOKENS = 20  # rows of the task token table, as in 12-in-1


@dataclass(frozen=True)
class StreamSize:
    """Sizes of one kind of attention layer: over the text, over the regions, or co-attention between them."""

    hidden_size: int
    num_heads: int
    intermediate_size: int


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a model. The defaults are VL-BERT BASE as the authors trained it."""

    # One letter per layer. J: joint attention over text and regions; T: over the text; V: over the regions; X:
    # co-attention between the two. VL-BERT and Unicoder-VL are "J" * 12, ViLBERT is "T" * 6 + "XTV" * 6.
    layers: str = "J" * 12
    hidden_size: int = 768  # width C of the model
    num_heads: int = 12  # attention heads, a divisor of hidden_size
    intermediate_size: int = 3072  # width of the feed-forward layers
    max_positions: int = 512  # rows of the position table: most tokens of an input; VL-BERT: with regions and [END]
    dropout: float = 0.1  # dropout probability in embedding, attention and layers
    initializer_range: float = 0.02  # standard deviation of new weights; 0.02 suits 768 channels, 0.06 suits 96
    visual_embedding_size: int | None = None  # width of a visual feature embedding; None: hidden_size
    visual_dropout: bool = True  # dropout before the fully connected layer of the visual feature embedding
    visual_activation: Literal["relu", "none"] = "relu"  # activation after that layer
    visual_initialisation: Literal["pytorch", "normal"] = "pytorch"  # of that layer: as nn.Linear, or as all others
    visual_norm: Literal["layer_norm", "none"] = "layer_norm"  # norm of the embedding before it is added to the others
    visual_gain_words: float = 0.0  # initial gain of that norm at tokens; 0: no effect of the image at first
    visual_gain_regions: float = 0.0  # initial gain of that norm at regions; 0: no effect of the image at first
    geometry: Literal["centre", "corners"] = "centre"  # geometry embedding of a box's centre and size, or two corners
    geometry_channels: int = 2048  # width of the geometry embedding, a multiple of 8
    special_tokens: Literal["own", "vocabulary"] = "own"  # [IMG] and [END]: own embeddings, or rows of the word table
    masked_region_token: bool = True  # a masked region has its own token instead of [IMG]
    end_visual_embedding: bool = False  # [END] carries the visual feature embedding of the whole image, as words do
    region_classes: int | None = None  # number of object classes, each with its own [IMG]; None: one [IMG] for all
    # visual_linguistic: VL-BERT's, where tokens carry visual features and [END] ends the input; only it uses the fields
    # from visual_embedding_size to region_classes. separate: text and regions are embedded independently, as in ViLBERT
    # and Unicoder-VL
    embedding: Literal["visual_linguistic", "separate"] = "visual_linguistic"
    region_hidden_size: int | None = None  # width C' of the regions in V and X; None: hidden_size
    region_num_heads: int | None = None  # attention heads of V; None: num_heads
    region_intermediate_size: int | None = None  # feed-forward width of V, and of X at regions; None: as in T
    coattention_size: int | None = None  # width of X's queries, keys and values; None: hidden_size
    coattention_num_heads: int | None = None  # attention heads of X; None: num_heads
    mentioned_regions: bool = False  # separate embedding: add a region's embedding to the words that name the region
    region_segment: bool = False  # separate embedding: regions have a segment embedding from their own table
    # Vector of region 0, the whole image. pooled: as for every other region; mean: the mean of the other regions'
    # vectors; none: the model does not read region 0
    whole_image: Literal["pooled", "mean", "none"] = "pooled"
    task_token: int | None = None  # row of the task token table to insert after [CLS] (12-in-1); None: no table
    # One vector for the whole input. tanh: BERT's pooler at [CLS]; product, sum: of a ReLU pooler at [CLS] and one at
    # the whole image (ViLBERT's fusion_method), as wide as co-attention; none: the hidden state at [CLS]
    pooler: Literal["tanh", "product", "sum", "none"] = "tanh"
    head_initialisation: Literal["xavier", "normal"] = "xavier"  # first weights of linear layers added by fine-tuning
    regions: RegionConfig = RegionConfig()  # source of the region vectors

    def __post_init__(self):
        check_choices(self)
        kind = ExactRegionConfig if self.embedding == "separate" else RegionConfig
        object.__setattr__(self, "regions", kind(**vars(self.regions)))
        check(self, self.layers and not self.layers.strip("JTVX"), "layers", "a string of the letters J, T, V and X")
        check_positive(
            self, "hidden_size", "num_heads", "intermediate_size", "max_positions", "geometry_channels",
            "visual_embedding_size", "region_classes", "region_hidden_size", "region_num_heads",
            "region_intermediate_size", "coattention_size", "coattention_num_heads", "initializer_range",
        )  # fmt: skip
        check(
            self, self.hidden_size % self.num_heads == 0, "num_heads", f"a divisor of hidden_size = {self.hidden_size}"
        )
        check(self, 0 <= self.dropout < 1, "dropout", "in [0, 1)")
        check(self, self.geometry_channels % 8 == 0, "geometry_channels", "a multiple of 8")
        self._check_streams()
        fits = self.special_tokens == "own" or (self.region_classes is None and not self.masked_region_token)
        check(self, fits, "special_tokens", "own if region_classes or masked_region_token is set")

    def _check_streams(self) -> None:
        regions, coattention, separate = self.regions_stream, self.coattention, self.embedding == "separate"
        one_width = regions.hidden_size == self.hidden_size
        for stream, name in ((regions, "region_num_heads"), (coattention, "coattention_num_heads")):
            width, fits = stream.hidden_size, stream.hidden_size % stream.num_heads == 0
            check(self, fits, name, f"a divisor of the width {width}; the value in effect is {stream.num_heads}")
        fits = one_width or ("J" not in self.layers and separate)
        check(self, fits, "region_hidden_size", f"{self.hidden_size} unless embedding is separate and layers lack J")
        check(self, separate or self.whole_image == "pooled", "whole_image", "pooled unless embedding is separate")
        check(self, separate or not self.region_segment, "region_segment", "false unless embedding is separate")
        fits = not self.mentioned_regions or (separate and one_width)
        wanted = "false unless embedding is separate and regions are as wide as the text"
        check(self, fits, "mentioned_regions", wanted)
        own = self.special_tokens == "own" and self.region_classes is None
        check(self, own or not separate, "special_tokens", "own, with region_classes none, if embedding is separate")
        check(self, separate or self.task_token is None, "task_token", "none unless embedding is separate")
        check(self, self.task_token is None or 0 <= self.task_token < TASK_TOKENS, "task_token", f"below {TASK_TOKENS}")
        fits = self.pooler not in ("product", "sum") or self.whole_image != "none"
        check(self, fits, "pooler", "tanh or none if whole_image is none")

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a text. VL-BERT needs two more positions: one for all regions, and one for [END]."""
        return self.max_positions - (2 if self.embedding == "visual_linguistic" else 0)

    @property
    def text_stream(self) -> "StreamSize":
        """Size of the text layers and the joint layers (T and J in `layers`)."""
        return StreamSize(self.hidden_size, self.num_heads, self.intermediate_size)

    @property
    def regions_stream(self) -> "StreamSize":
        """Size of the region layers (V in `layers`)."""
        return StreamSize(
            self.region_hidden_size or self.hidden_size,
            self.region_num_heads or self.num_heads,
            self.region_intermediate_size or self.intermediate_size,
        )

    @property
    def coattention(self) -> "StreamSize":
        """Size of the co-attention layers (X in `layers`). intermediate_size is 0, because each stream has its own."""
        return StreamSize(self.coattention_size or self.hidden_size, self.coattention_num_heads or self.num_heads, 0)

    def word_rows(self, vocab_size: int) -> int:
        """Return the number of word embeddings, including [IMG] and [END] if special_tokens is "vocabulary"."""
        return vocab_size + (2 if self.special_tokens == "vocabulary" else 0)


@dataclass(frozen=True)
class DataConfig:
    """Datasets and batches of a run, and how samples are read."""

    root: str = ""  # folder or s3://bucket/prefix that holds the shards; required
    # Datasets to train on (their region shards), each with a weight: its share of the examples, relative to the other
    # weights. Without weights: in proportion to their sizes when the run starts, so that their epochs end together.
    datasets: Weights = field(default_factory=lambda: {"captions": None})
    held_out: tuple[str, ...] | None = None  # datasets to validate on; None: a share of `datasets`
    held_out_share: float = 0.0  # share of `datasets`, by key, to validate on instead of training; 0 with held_out
    detector: str | None = None  # id of the detector whose regions to read; None: the only one in the root
    batch: int = 128  # examples with an image per optimizer step, over all ranks
    text_batch: int = 0  # text-only examples per optimizer step, over all ranks (the paper's ratio is 1:1)
    text_corpus: str | None = None  # folder made by `vlbert corpus`; required if text_batch > 0
    unreadable: float = 0.1  # abort if more than this share of the samples is unreadable
    gradient_accumulation: int = 1  # split each batch into this many parts, one backward pass each
    flip: float = 0.0  # probability of mirroring an image
    workers: int = 2  # loading processes per rank; 0: load in the training process
    # Minimum number of steps between checks for new shards, which are used from the next epoch on; None: never
    new_shards_every: int | None = 100
    chunk: int = 1  # shuffle groups of this many neighbouring samples, for fewer range requests; 1: a full shuffle
    cache: str | None = None  # folder on each machine that caches whole tars of an s3:// root; None: no cache
    cache_gb: float = 100.0  # maximum size of the cache, in 10^9 bytes
    seed: int = 0  # random seed of order, masking and dropout

    def __post_init__(self):
        check_choices(self)
        self._check_datasets()
        check_positive(self, "batch", "gradient_accumulation", "new_shards_every", "chunk", "cache_gb")
        for name in ("text_batch", "workers", "seed"):
            check(self, getattr(self, name) >= 0, name, "0 or more")
        check(self, 0 <= self.unreadable <= 1, "unreadable", "a share from 0 to 1")
        check(self, 0 <= self.flip <= 1, "flip", "a probability")
        check(self, 0 <= self.held_out_share < 1, "held_out_share", "a share from 0 to below 1")
        object.__setattr__(self, "held_out_share", 0.0 if self.held_out else self.held_out_share)

    def _check_datasets(self) -> None:
        check(self, self.datasets, "datasets", "names of datasets, each with or without a weight")
        weights = [*self.datasets.values()]
        fits = weights.count(None) == len(weights) or all(weight and 0 < weight < math.inf for weight in weights)
        check(self, fits, "datasets", "a positive weight for each name, or for none")
        names = self.held_out is None or 0 < len(self.held_out) == len({*self.held_out})
        check(self, names, "held_out", "names of datasets, each once, or none")


@dataclass(frozen=True)
class Recipe(RunSettings):
    """Full configuration of a run. Functions in vlbert/recipes/ make recipes; the command line can override fields."""

    task: Any  # settings of the task; their type selects the task (vlbert.tasks.make_task)
    model: ModelConfig = ModelConfig()  # architecture
    data: DataConfig = DataConfig()  # datasets and batches
    optimizer: OptimizerConfig = OptimizerConfig()  # optimizer and learning rate
    init_from: str | None = None  # checkpoint to start VL-BERT from: path of a step-* folder or of a model folder
    bert: str | None = None  # Hugging Face folder or Hub name of a BERT to start from; with init_from, only its pooler
    vocabulary: str | None = None  # vocab.txt; None: that of init_from or bert, else built from the captions
    vocabulary_size: int = 30_522  # maximum number of tokens in a vocabulary built from captions
    # Precision of matrix products and convolutions, on any device. fp32; tf32: inputs rounded to 10 bits (GPUs; CPUs
    # compute fp32); bf16: with weights, norms, losses and RoIAlign in fp32 (on CPUs it is fast only with AMX).
    precision: Literal["fp32", "tf32", "bf16"] = "bf16"
    activation_checkpointing: bool = False  # recompute activations in the backward pass: half the memory. Blocks with
    #                                         trained BatchNorms (resnet.norm=batch) are not recomputed
    compile: bool = False  # use torch.compile: takes minutes at the start, and is not faster on CPUs
    validation_samples: int | None = 10_000  # maximum number of held-out examples per validation; None: all

    def __post_init__(self):
        super().__post_init__()
        check_choices(self.task)
        object.__setattr__(self, "task", self.task.fit(self.model, text_rows=self.data.text_batch > 0))
        check_positive(self, "vocabulary_size", "validation_samples")
        whole = not self.data.held_out_share or self.task.validate_on is None
        check(self.data, whole, "held_out_share", "0 if the task has splits")
        tf32 = self.compile and self.precision == "tf32"
        check(self, not tf32, "compile", "false with precision tf32: torch refuses both together")
        check_decay(self.optimizer, self.steps)
        fits = not (self.random_init and (self.init_from or self.bert))
        check(self, fits, "random_init", "false with init_from or bert")


# Fields of a model that may differ from those of the checkpoint it starts from: initialisation, dropout, inputs.
_FREE = {"dropout", "initializer_range", "visual_gain_words", "visual_gain_regions", "mentioned_regions"}
_FREE |= {"visual_dropout", "visual_initialisation", "head_initialisation"}
_FREE |= {"regions.short_side", "regions.long_side", "regions.frozen_stages", "regions.masked_pixels"}
_FREE |= {"regions.padding", "regions.weights", "regions.random_init"}


def architecture(config: ModelConfig) -> dict[str, object]:
    """Return the field values that two models must have in common to share weights, by dotted field name."""
    regions, coattention = config.regions_stream, config.coattention
    sizes = {  # the sizes in effect where a field is None
        "region_hidden_size": regions.hidden_size,
        "region_num_heads": regions.num_heads,
        "region_intermediate_size": regions.intermediate_size,
        "coattention_size": coattention.hidden_size,
        "coattention_num_heads": coattention.num_heads,
    }
    return {name: value for name, value in (flat(to_json(config)) | sizes).items() if name not in _FREE}
