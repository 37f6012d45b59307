"""Every setting of a run, each with what it is for. Frozen, and checked when made: errors come at second 0."""

from dataclasses import dataclass
from typing import Any, Literal

from detectors.resnet import ResNetConfig
from storage.settings import check, check_choices, flat, to_json
from training.optimizer import OptimizerConfig, check_decay


@dataclass(frozen=True)
class RegionConfig:
    """One vector a region: by a Fast R-CNN that is trained along (paper 3.2, 3.3), or kept by a detector beforehand."""

    features: Literal["end_to_end", "precomputed"] = "end_to_end"  # from pixels, or float16 vectors in the shards
    resnet: ResNetConfig = ResNetConfig(
        stem_pool="torch"
    )  # ResNet-101; the authors pad its first pool, detectors do not
    short_side: int = 600  # pictures are resized to this many pixels on their short side ...
    long_side: int = 1000  # ... unless the long side would pass this
    roi_size: int = 14  # RoIAlign gives roi_size x roi_size cells a region
    frozen_stages: int = 2  # 2: conv1 and res2 get no gradient, as in the authors' code; 0: all is trained
    weights: str | None = None  # safetensors file of a detector whose ResNet (backbone and res5) to start from
    random_init: bool = False  # start from random weights: said in so many words, or refused
    pixel_mean: tuple[float, float, float] = (102.9801, 115.9465, 122.7717)  # of B, G, R, 0..255: the VG detector's
    pixel_std: float = 1.0  # pixels are divided by it after the mean is taken off
    # Masked regions lose their raw pixels (paper 3.3) or, as precomputed features must, nothing but their own vector,
    # which one learned vector replaces: then regions that overlap them still show what is asked for.
    masking: Literal["pixels", "features"] = "pixels"
    masked_pixels: Literal["mean", "black"] = "mean"  # what hidden pixels show: the mean colour, or zeros before it
    # How pictures of several sizes are padded with zeros: `groups` of similar shape, at most two a batch, each to its
    # largest height and width; the whole `batch` to its largest, as the authors' code does; or `fixed`, each to
    # short_side x long_side (upright: long_side x short_side) whatever the batch, as it does in VCR. Features near a
    # picture's right and lower border depend on it.
    padding: Literal["groups", "batch", "fixed"] = "groups"

    def __post_init__(self):
        check_choices(self)
        check(self, 0 <= self.frozen_stages <= 5, "frozen_stages", "0 to 5")
        check(self, 0 < self.short_side <= self.long_side, "short_side", "at most long_side")
        check(self, self.roi_size > 0, "roi_size", "at least 1")
        check(self, len(self.pixel_mean) == 3, "pixel_mean", "three numbers, of blue, green and red")
        check(self, self.pixel_std > 0, "pixel_std", "positive")
        check(self, not (self.weights and self.random_init), "random_init", "false where weights are named")
        check(self, self.features == "end_to_end" or not self.weights, "weights", "None where features are precomputed")

    @property
    def channels(self) -> int:
        """Width D of a region's vector; precomputed ones come from a ResNet of the same width."""
        return self.resnet.res5_channels

    @property
    def masks_features(self) -> bool:
        """Whether a masked region's vector is replaced by a learned one."""
        return self.features == "precomputed" or self.masking == "features"


@dataclass(frozen=True)
class ModelConfig:
    """VL-BERT's architecture; the defaults are BASE as the authors trained it."""

    layers: str = "J" * 12  # one letter a layer; J: joint attention over text and regions
    hidden_size: int = 768  # width of the encoder
    num_heads: int = 12  # attention heads of a layer; they divide hidden_size
    intermediate_size: int = 3072  # width of the feed-forward layers
    max_positions: int = 512  # position embeddings: the longest row of text; BERT has 512
    dropout: float = 0.1  # probability, in the embedding and in each layer
    initializer_range: float = (
        0.02  # standard deviation of new weights. 0.02 belongs to 768 channels: with 96, take 0.06
    )
    visual_embedding_size: int | None = None  # width of a look, the visual feature embedding; None: hidden
    visual_dropout: bool = True  # dropout on what goes into the look's fully connected layer
    visual_activation: Literal["relu", "none"] = "relu"  # after that layer
    visual_initialisation: Literal["pytorch", "normal"] = "pytorch"  # of that layer: nn.Linear's own rule, or as all
    visual_norm: Literal["layer_norm", "scale", "none"] = "layer_norm"  # before a look is added to words and regions
    visual_gain_words: float = 0.0  # gain that this norm (or scale) starts with, at words ...
    visual_gain_regions: float = 0.0  # ... and at regions; at 0 the picture is faded in
    geometry: Literal["centre", "corners"] = "centre"  # a box as centre and size, or as its two corners
    geometry_channels: int = 2048  # width of the sine and cosine embedding of a box
    special_tokens: Literal["own", "vocabulary"] = "own"  # [IMG] and [END]: apart, or words that can be answers too
    masked_region_token: bool = True  # a masked region has a token of its own, instead of [IMG]
    end_visual_embedding: bool = False  # [END] carries the look of the whole image, as words do
    region_classes: int | None = None  # one [IMG] for each of so many classes of objects; None: one for all
    head_initialisation: Literal["xavier", "normal"] = "xavier"  # linear layers that fine-tuning adds
    regions: RegionConfig = RegionConfig()  # where the vector of a region comes from

    def __post_init__(self):
        check_choices(self)
        check(
            self, self.layers and not self.layers.strip("J"), "layers", "a string of J (T, V and X are not there yet)"
        )
        for name in ("hidden_size", "num_heads", "intermediate_size", "max_positions", "geometry_channels"):
            check(self, getattr(self, name) > 0, name, "at least 1")
        for name in ("visual_embedding_size", "region_classes"):
            check(self, getattr(self, name) is None or getattr(self, name) > 0, name, "at least 1, or none")
        check(self, self.initializer_range > 0, "initializer_range", "positive")
        check(
            self, self.hidden_size % self.num_heads == 0, "num_heads", f"a divisor of hidden_size = {self.hidden_size}"
        )
        check(self, 0 <= self.dropout < 1, "dropout", "in [0, 1)")
        check(self, self.geometry_channels % 8 == 0, "geometry_channels", "a multiple of 8")
        alone = self.special_tokens == "own" or (self.region_classes is None and not self.masked_region_token)
        check(self, alone, "special_tokens", "own where regions have tokens by class or hidden ones one of theirs")

    def word_rows(self, vocab_size: int) -> int:
        """Rows of the word table: the vocabulary and, where they belong to it, [IMG] and [END] behind it."""
        return vocab_size + (2 if self.special_tokens == "vocabulary" else 0)


@dataclass(frozen=True)
class DataConfig:
    """What is read, and in which portions."""

    root: str = ""  # folder or s3://bucket/prefix that holds the shards; a run needs it
    dataset: str = "captions"  # whose region shards are trained on
    held_out: str | None = None  # dataset that validation reads; None: no validation
    detector: str | None = None  # id of the detector whose regions to read; None: the only one there is
    batch: int = 128  # examples with a picture, over all ranks together and one optimizer step
    text_batch: int = 0  # text-only rows beside them (the paper's ratio is 1:1)
    text_corpus: str | None = None  # folder made by `python -m vlbert.data.corpus`; needed where text_batch > 0
    unreadable: float = 0.1  # share of the samples that may be unreadable; more end the run
    gradient_accumulation: int = 1  # batches are cut into this many parts, one backward pass each
    flip: float = 0.0  # probability of mirroring a picture
    workers: int = 2  # loading processes a rank; 0: load in the training process
    new_shards_every: int | None = 100  # steps between looks for new shards, at least: they enter at the first border
    #                                     of an epoch after that; None: never
    chunk: int = 1  # so many neighbours of a shard stay together in the order: fewer range requests; 1: a full shuffle
    cache: str | None = None  # folder of each machine for whole tars of an s3:// root, filled in the background
    cache_gb: float = 100.0  # 10^9 bytes that the folder may take
    seed: int = 0  # of order, masking and dropout

    def __post_init__(self):
        check_choices(self)
        check(self, self.batch > 0, "batch", "at least 1")
        check(self, 0 <= self.unreadable <= 1, "unreadable", "a share from 0 to 1")
        check(self, self.text_batch >= 0, "text_batch", "0 or more")
        check(self, self.gradient_accumulation > 0, "gradient_accumulation", "at least 1")
        check(self, self.workers >= 0, "workers", "0 or more")
        check(self, self.new_shards_every is None or self.new_shards_every > 0, "new_shards_every", "at least 1")
        check(self, self.chunk > 0, "chunk", "at least 1")
        check(self, self.cache_gb > 0, "cache_gb", "positive")
        check(self, self.seed >= 0, "seed", "0 or more")
        check(self, 0 <= self.flip <= 1, "flip", "a probability")


@dataclass(frozen=True)
class Recipe:
    """One run, whole: `recipes.py` holds functions that return one; the command line may override fields."""

    name: str  # of the recipe; also that of the run where `run` is empty
    task: Any  # the settings of a task; its type decides which (vlbert.tasks.make_task)
    model: ModelConfig = ModelConfig()  # the architecture
    data: DataConfig = DataConfig()  # what is read, in which batches
    optimizer: OptimizerConfig = OptimizerConfig()  # how weights change, and at which rate
    steps: int = 250_000  # optimizer steps in all
    run: str = ""  # name of the run: its folder is ROOT/runs/<run>; empty: the recipe's name
    init_from: str | None = None  # checkpoint whose VL-BERT this run starts with ("path of a step-* folder")
    bert: str | None = None  # Hugging Face folder or hub name of a BERT to start from; with init_from, its pooler alone
    random_init: bool = False  # start from random weights: said in so many words where a run fine-tunes, or refused
    vocabulary: str | None = None  # vocab.txt; None: that of init_from or bert, else built from the captions
    vocabulary_size: int = 30_522  # at most so many pieces where the vocabulary is built
    # What matrix products and convolutions are computed in, on any device: fp32; tf32, which rounds what goes into them
    # to 10 bits (GPUs; CPUs compute fp32); or bf16, with weights, norms, losses and RoIAlign in fp32 (CPUs want AMX).
    precision: Literal["fp32", "tf32", "bf16"] = "bf16"
    activation_checkpointing: bool = (
        False  # keep no activations but compute them again in the backward pass: half the memory
    )
    compile: bool = False  # torch.compile: takes minutes at the start, and does not pay on CPUs
    spike: float | None = (
        5.0  # a step is left out where its loss is so many times the mean of the last 100; None: never
    )
    most_skipped: int = 10  # so many steps left out in a row, for a spike or a loss that is no number, end the run
    log_every: int = 20  # steps between progress lines
    validate_every: int = 5_000  # steps between validations; the last step always validates
    validation_samples: int | None = 10_000  # at most so many held-out examples a validation; None: all
    save_every: int = 5_000  # steps between checkpoints; the last step always saves
    keep_checkpoints: int = 2  # the newest so many, and the one that validated best; others are removed

    def __post_init__(self):
        check_choices(self)
        check_choices(self.task)
        check(self, self.steps > 0, "steps", "at least 1")
        for every in ("log_every", "validate_every", "save_every", "keep_checkpoints", "most_skipped"):
            check(self, getattr(self, every) > 0, every, "at least 1")
        check(self, self.vocabulary_size > 0, "vocabulary_size", "at least 1")
        check(self, self.validation_samples is None or self.validation_samples > 0, "validation_samples", "at least 1")
        check(self, self.spike is None or self.spike > 1, "spike", "more than 1, or none")
        check(
            self, not (self.compile and self.precision == "tf32"), "compile", "false with tf32: torch refuses the two"
        )
        live = self.model.regions.features == "end_to_end" and self.model.regions.resnet.norm == "batch"
        check(
            self,
            not (self.compile and self.activation_checkpointing and live),
            "compile",
            "false with activation_checkpointing and live norms",
        )
        check_decay(self.optimizer, self.steps)
        check(self, not (self.random_init and (self.init_from or self.bert)), "random_init", "false with a start")

    @property
    def run_name(self) -> str:
        return self.run or self.name


# Fields of a model that a run may choose anew when it starts from a checkpoint: what it begins with, and how it is fed.
_FREE = {"dropout", "initializer_range", "visual_gain_words", "visual_gain_regions"}
_FREE |= {"visual_dropout", "visual_initialisation", "head_initialisation"}
_FREE |= {"regions.short_side", "regions.long_side", "regions.frozen_stages", "regions.masked_pixels"}
_FREE |= {"regions.padding"}
_FREE |= {"regions.weights", "regions.random_init"}


def architecture(config: ModelConfig) -> dict[str, object]:
    """The fields, dotted, that two models must share for one to take the other's weights."""
    return {name: value for name, value in flat(to_json(config)).items() if name not in _FREE}
