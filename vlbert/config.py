"""Every setting of a run. The dataclasses are frozen and check themselves when they are made."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from detectors.resnet import ResNetConfig
from storage.settings import Weights, check, check_choices, check_positive, flat, to_json
from training.optimizer import OptimizerConfig, check_decay
from training.recipe import RunSettings


@dataclass(frozen=True)
class RegionConfig:
    """Where the appearance features of regions come from, one vector a region: see vlbert/model/fast_rcnn.py."""

    # end_to_end: a Fast R-CNN that is trained along (paper 3.2, 3.3); precomputed: float16 vectors in the shards
    features: Literal["end_to_end", "precomputed"] = "end_to_end"
    resnet: ResNetConfig = ResNetConfig(stem_pool="torch")  # ResNet-101; the authors pad its first pooling layer
    short_side: int = 600  # pixels; images are resized so that their short side is this long ...
    long_side: int = 1000  # ... or their long side this, whichever is smaller
    roi_size: int = 14  # RoIAlign gives roi_size x roi_size cells a region
    frozen_stages: int = 2  # stages without gradient, 0 to 5; 2: conv1 and res2, as in the authors' code
    weights: str | None = None  # safetensors file of a detector: backbone and res5 start from its ResNet
    random_init: bool = False  # start from random weights; a run without any weights is refused unless this is true
    pixel_mean: tuple[float, float, float] = (102.9801, 115.9465, 122.7717)  # of B, G, R, 0 to 255: the VG detector's
    pixel_std: float = 1.0  # pixels are divided by it after the mean is subtracted
    # What a masked region loses. pixels: its raw pixels (paper 3.3). features: only its own vector, which one learned
    # vector replaces; regions that overlap it still show it. Precomputed features are always masked the second way.
    masking: Literal["pixels", "features"] = "pixels"
    masked_features: Literal["learned", "zeros"] = "learned"  # vector of a masked region: learned from zero, or zero
    masked_pixels: Literal["mean", "black"] = "mean"  # value of masked pixels: the mean colour, or 0 before it
    # How images of several sizes are padded with zeros. groups: at most two groups of similar shape a batch, each
    # padded to its largest height and width. batch: all to the largest of the batch, as in the authors' code. fixed:
    # each to short_side x long_side (upright: long_side x short_side), as in the authors' VCR. Features near an image's
    # right and lower border depend on it.
    padding: Literal["groups", "batch", "fixed"] = "groups"

    def __post_init__(self):
        check_choices(self)
        check(self, 0 <= self.frozen_stages <= 5, "frozen_stages", "0 to 5")
        check(self, 0 < self.short_side <= self.long_side, "short_side", "at most long_side")
        check_positive(self, "roi_size", "pixel_std")
        check(self, len(self.pixel_mean) == 3, "pixel_mean", "three numbers, of blue, green and red")
        check(self, not (self.weights and self.random_init), "random_init", "false where weights are named")
        check(self, self.features == "end_to_end" or not self.weights, "weights", "None where features are precomputed")

    @property
    def channels(self) -> int:
        """Width D of a region's vector; precomputed vectors have it too."""
        return self.resnet.res5_channels

    @property
    def masks_features(self) -> bool:
        """Whether a masked region's vector is replaced by a learned one."""
        return self.features == "precomputed" or self.masking == "features"


TASK_TOKENS = 20  # rows of the table of task tokens, as 12-in-1 has it


@dataclass(frozen=True)
class StreamSize:
    """The sizes of attention over one stream."""

    hidden_size: int
    num_heads: int
    intermediate_size: int


@dataclass(frozen=True)
class ModelConfig:
    """The architecture; the defaults are VL-BERT BASE as the authors trained it."""

    # One letter a layer. J: joint attention over text and regions; T: over the text; V: over the regions; X:
    # co-attention from each to the other. VL-BERT and Unicoder-VL are "J" * 12, ViLBERT is "T" * 6 + "XTV" * 6.
    layers: str = "J" * 12
    hidden_size: int = 768  # width C of the model
    num_heads: int = 12  # attention heads, a divisor of hidden_size
    intermediate_size: int = 3072  # width of the feed-forward layers
    max_positions: int = 512  # rows of the position table: tokens of a row; VL-BERT: and regions and [END]
    dropout: float = 0.1  # probability, in embedding, attention and layers
    initializer_range: float = 0.02  # standard deviation of new weights; 0.02 suits 768 channels, 0.06 suits 96
    visual_embedding_size: int | None = None  # width of a visual feature embedding; None: hidden_size
    visual_dropout: bool = True  # dropout before the fully connected layer of the visual feature embedding
    visual_activation: Literal["relu", "none"] = "relu"  # after that layer
    visual_initialisation: Literal["pytorch", "normal"] = "pytorch"  # of that layer: nn.Linear's, or as all others
    visual_norm: Literal["layer_norm", "none"] = "layer_norm"  # before it is added to tokens and regions
    visual_gain_words: float = 0.0  # initial gain of that norm at tokens ...
    visual_gain_regions: float = 0.0  # ... and at regions; 0 fades the image in
    geometry: Literal["centre", "corners"] = "centre"  # a box as centre and size, or as its two corners
    geometry_channels: int = 2048  # width of the geometry embedding, a multiple of 8
    special_tokens: Literal["own", "vocabulary"] = "own"  # [IMG] and [END]: own embeddings, or rows of the word table
    masked_region_token: bool = True  # a masked region has a token of its own, instead of [IMG]
    end_visual_embedding: bool = False  # [END] carries the visual feature embedding of the whole image, as words do
    region_classes: int | None = None  # one [IMG] for each of so many classes of objects; None: one for all
    # visual_linguistic: VL-BERT's, where tokens carry visual features and [END] closes a row; all fields from
    # visual_embedding_size to region_classes are of it alone. separate: text and regions each by itself, as ViLBERT and
    # Unicoder-VL have it
    embedding: Literal["visual_linguistic", "separate"] = "visual_linguistic"
    region_hidden_size: int | None = None  # width C' of the regions in V and X; None: hidden_size
    region_num_heads: int | None = None  # attention heads of V; None: num_heads
    region_intermediate_size: int | None = None  # feed-forward width of V, and of X at regions; None: as of T
    coattention_size: int | None = None  # width of X's queries, keys and values; None: hidden_size
    coattention_num_heads: int | None = None  # attention heads of X; None: num_heads
    mentioned_regions: bool = False  # separate embedding: a word that names a region carries its embedding too
    region_segment: bool = False  # separate embedding: regions have a segment embedding, from a table of their own
    # Region 0, which is the whole image. pooled: a region as all others; mean: its vector is the mean of the others';
    # none: the model does not read it
    whole_image: Literal["pooled", "mean", "none"] = "pooled"
    task_token: int | None = None  # row of the table of task tokens that stands behind [CLS] (12-in-1); None: no table
    # A row as one vector. tanh: BERT's pooler at [CLS]; product: of a ReLU pooler at [CLS] and one at the whole image
    # (ViLBERT), as wide as co-attention; none: the state at [CLS] itself
    pooler: Literal["tanh", "product", "none"] = "tanh"
    head_initialisation: Literal["xavier", "normal"] = "xavier"  # of linear layers that fine-tuning adds
    regions: RegionConfig = RegionConfig()  # where the vector of a region comes from

    def __post_init__(self):
        check_choices(self)
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
        alone = self.special_tokens == "own" or (self.region_classes is None and not self.masked_region_token)
        check(self, alone, "special_tokens", "own where regions have tokens by class, or masked ones their own")

    def _check_streams(self) -> None:
        regions, coattention, separate = self.regions_stream, self.coattention, self.embedding == "separate"
        one_width = regions.hidden_size == self.hidden_size
        for stream, name in ((regions, "region_num_heads"), (coattention, "coattention_num_heads")):
            width, fits = stream.hidden_size, stream.hidden_size % stream.num_heads == 0
            check(self, fits, name, f"a divisor of the width {width}, and it is {stream.num_heads}")
        fits = one_width or ("J" not in self.layers and separate)
        check(self, fits, "region_hidden_size", f"{self.hidden_size} unless embedding is separate and layers lack J")
        check(self, separate or self.whole_image == "pooled", "whole_image", "pooled unless embedding is separate")
        check(self, separate or not self.region_segment, "region_segment", "false unless embedding is separate")
        fits = not self.mentioned_regions or (separate and one_width)
        wanted = "false unless embedding is separate and regions are as wide as the text"
        check(self, fits, "mentioned_regions", wanted)
        own = self.special_tokens == "own" and self.region_classes is None
        check(self, own or not separate, "special_tokens", "own, and region_classes none, where embedding is separate")
        check(self, separate or self.task_token is None, "task_token", "none unless embedding is separate")
        check(self, self.task_token is None or 0 <= self.task_token < TASK_TOKENS, "task_token", f"below {TASK_TOKENS}")
        fits = self.pooler != "product" or self.whole_image != "none"
        check(self, fits, "pooler", "tanh or none where whole_image is none")

    @property
    def text_stream(self) -> "StreamSize":
        """Of layers T and, as both streams in one, of layers J."""
        return StreamSize(self.hidden_size, self.num_heads, self.intermediate_size)

    @property
    def regions_stream(self) -> "StreamSize":
        """Of layers V."""
        return StreamSize(
            self.region_hidden_size or self.hidden_size,
            self.region_num_heads or self.num_heads,
            self.region_intermediate_size or self.intermediate_size,
        )

    @property
    def coattention(self) -> "StreamSize":
        """Of layers X; without a feed-forward width, which is that of the stream."""
        return StreamSize(self.coattention_size or self.hidden_size, self.coattention_num_heads or self.num_heads, 0)

    def word_rows(self, vocab_size: int) -> int:
        """Rows of the word table: the vocabulary and, where they belong to it, [IMG] and [END] behind it."""
        return vocab_size + (2 if self.special_tokens == "vocabulary" else 0)


@dataclass(frozen=True)
class DataConfig:
    """The data of a run, and how it is dealt out and read."""

    root: str = ""  # folder or s3://bucket/prefix that holds the shards; a run needs it
    # Datasets to train on, their region shards, each with its weight: its share of the examples, relative to the other
    # weights. Without weights: as many of each as it has when the run begins, so that their epochs end together.
    datasets: Weights = field(default_factory=lambda: {"captions": None})
    held_out: tuple[str, ...] | None = None  # datasets to validate on; None: no validation
    detector: str | None = None  # id of the detector whose regions to read; None: the only one there is
    batch: int = 128  # examples with an image of one optimizer step, over all ranks
    text_batch: int = 0  # text-only rows beside them (the paper's ratio is 1:1)
    text_corpus: str | None = None  # folder made by `vlbert corpus`; needed where text_batch > 0
    unreadable: float = 0.1  # share of the samples that may be unreadable; more end the run
    gradient_accumulation: int = 1  # batches are cut into this many parts, one backward pass each
    flip: float = 0.0  # probability of mirroring an image
    workers: int = 2  # loading processes a rank; 0: load in the training process
    new_shards_every: int | None = 100  # least steps between checks for new shards, which enter at the next boundary of
    #                                     an epoch; None: never
    chunk: int = 1  # so many neighbours of a shard stay together in the order: fewer range requests; 1: a full shuffle
    cache: str | None = None  # folder of each machine for whole tars of an s3:// root, filled in the background
    cache_gb: float = 100.0  # 10^9 bytes that the folder may take
    seed: int = 0  # of order, masking and dropout

    def __post_init__(self):
        check_choices(self)
        self._check_datasets()
        check_positive(self, "batch", "gradient_accumulation", "new_shards_every", "chunk", "cache_gb")
        for name in ("text_batch", "workers", "seed"):
            check(self, getattr(self, name) >= 0, name, "0 or more")
        check(self, 0 <= self.unreadable <= 1, "unreadable", "a share from 0 to 1")
        check(self, 0 <= self.flip <= 1, "flip", "a probability")

    def _check_datasets(self) -> None:
        check(self, self.datasets, "datasets", "names of datasets, each with its weight or none")
        weights = [*self.datasets.values()]
        fits = weights.count(None) == len(weights) or all(weight and 0 < weight < math.inf for weight in weights)
        check(self, fits, "datasets", "a positive weight for each name, or none for all")
        names = self.held_out is None or 0 < len(self.held_out) == len({*self.held_out})
        check(self, names, "held_out", "names of datasets, each once, or none")

    @property
    def dataset_names(self) -> list[str]:
        """The datasets to train on, in the order of their names: that in which they are given has no meaning."""
        return sorted(self.datasets)


@dataclass(frozen=True)
class Recipe(RunSettings):
    """The full configuration of a run. Functions of vlbert/recipes/ return one; the command line overrides fields."""

    task: Any  # the settings of a task; their type decides which (vlbert.tasks.make_task)
    model: ModelConfig = ModelConfig()  # the architecture
    data: DataConfig = DataConfig()  # what is read, in which batches
    optimizer: OptimizerConfig = OptimizerConfig()  # how weights change, and at which rate
    init_from: str | None = None  # checkpoint whose VL-BERT this run starts with: path of a step-* folder, or a model's
    bert: str | None = None  # Hugging Face folder or hub name of a BERT to start from; with init_from, only its pooler
    vocabulary: str | None = None  # vocab.txt; None: that of init_from or bert, else built from the captions
    vocabulary_size: int = 30_522  # most tokens of a vocabulary that is built
    # Type of matrix products and convolutions, on any device. fp32; tf32: inputs rounded to 10 bits (GPUs; CPUs compute
    # fp32); bf16: with weights, norms, losses and RoIAlign in fp32 (on CPUs it is fast only with AMX).
    precision: Literal["fp32", "tf32", "bf16"] = "bf16"
    activation_checkpointing: bool = False  # compute activations again in the backward pass: half the memory. Blocks
    #                                         with live norms (resnet.norm=batch) stay as they are
    compile: bool = False  # torch.compile: takes minutes at the start, and is not faster on CPUs
    validation_samples: int | None = 10_000  # most held-out examples of a validation; None: all

    def __post_init__(self):
        super().__post_init__()
        check_choices(self.task)
        check_positive(self, "vocabulary_size", "validation_samples")
        tf32 = self.compile and self.precision == "tf32"
        check(self, not tf32, "compile", "false with tf32: torch refuses the two")
        check_decay(self.optimizer, self.steps)
        check(self, not (self.random_init and (self.init_from or self.bert)), "random_init", "false with a start")


# Fields of a model that may differ from the checkpoint it starts from: initialisation, dropout, inputs.
_FREE = {"dropout", "initializer_range", "visual_gain_words", "visual_gain_regions", "mentioned_regions"}
_FREE |= {"visual_dropout", "visual_initialisation", "head_initialisation"}
_FREE |= {"regions.short_side", "regions.long_side", "regions.frozen_stages", "regions.masked_pixels"}
_FREE |= {"regions.padding", "regions.weights", "regions.random_init"}


def architecture(config: ModelConfig) -> dict[str, object]:
    """The fields (dotted) and values that two models must share so that one can load the other's weights."""
    regions, coattention = config.regions_stream, config.coattention
    sizes = {  # as they are, where a field says none
        "region_hidden_size": regions.hidden_size,
        "region_num_heads": regions.num_heads,
        "region_intermediate_size": regions.intermediate_size,
        "coattention_size": coattention.hidden_size,
        "coattention_num_heads": coattention.num_heads,
    }
    return {name: value for name, value in (flat(to_json(config)) | sizes).items() if name not in _FREE}
