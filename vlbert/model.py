"""VLBert: a batch of captions and pictures in, contextual vectors of words and regions out."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.nn.functional as F
from huggingface_hub import ModelHubMixin, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor, nn

from vlbert.batch import Batch
from vlbert.checkpoint import CONFIG, MODEL, VOCABULARY, load_model, model_files, read_model
from vlbert.config import ModelConfig
from vlbert.embedding import LAYER_NORM_EPS, VisualLinguisticEmbedding
from vlbert.regions import FastRCNN
from vlbert.text import Vocabulary
from vlbert.transformer import Encoder

if TYPE_CHECKING:
    from vlbert.tasks import Task

ClassifierKind = Literal["linear", "two_layers", "words", "regions"]


@dataclass(frozen=True, eq=False)
class Encoded:
    """What the encoder says. Padding means nothing; the masks are the batch's.

    text        float [N, T, C]
    regions     float [N, R, C]
    appearance  float [K, D]         what was seen in the real regions of all pictures, in picture order
    attentions  a float [N, heads, T + R + 1, T + R + 1] a layer, where they were asked for: how much each word, region
                and [END], in this order, attends to each; a row sums to 1, and gives padding nothing
    """

    text: Tensor
    regions: Tensor
    appearance: Tensor
    attentions: tuple[Tensor, ...] | None = None


class VLBert(nn.Module, ModelHubMixin, library_name="vlbert"):
    """Fast R-CNN features, the visual-linguistic embedding and the encoder (paper, figure 1).

    `VLBert.from_pretrained(folder or hub name)` reads what `save_pretrained(folder)`, a training run (into its step-*
    folders) or `python -m vlbert.published` wrote: config.json, model.safetensors and vocab.txt. `vocabulary` is that
    of the weights, where they came with one.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, vocabulary: Vocabulary | None = None):
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.vocabulary = vocabulary
        self.fast_rcnn = FastRCNN(config.regions) if config.regions.features == "end_to_end" else None
        self.embedding = VisualLinguisticEmbedding(config, vocab_size)
        self.encoder = Encoder(config)
        initialise(self.embedding, config.initializer_range)
        initialise(self.encoder, config.initializer_range)
        self.embedding.initialise()

    def forward(self, batch: Batch, attentions: bool = False) -> Encoded:
        """Batch (see vlbert/batch.py) -> Encoded, with attention maps if `attentions`.

        ValueError where a row is longer than the position table, or the batch brings no features and the model takes
        precomputed ones.
        """
        if batch.tokens.shape[1] + 2 > self.config.max_positions:
            row = int(batch.text_mask.sum(dim=1).argmax())
            raise ValueError(
                f"row {row} of the batch with sample {batch.keys[0]}: {batch.tokens.shape[1]} word pieces, regions and "
                f"[END] need {batch.tokens.shape[1] + 2} positions, the model has max_positions = "
                f"{self.config.max_positions}"
            )
        appearance = self.appearance(batch)
        embedded, mask = self.embedding(batch, appearance)
        maps: list[Tensor] | None = [] if attentions else None
        encoded = self.encoder(embedded, mask, maps)
        t, r = batch.tokens.shape[1], batch.region_mask.shape[1]
        return Encoded(encoded[:, :t], encoded[:, t : t + r], appearance, tuple(maps) if attentions else None)

    def appearance(self, batch: Batch) -> Tensor:
        """What is seen in the K real regions of the batch's pictures, in picture order: [K, D]."""
        if not len(batch.picture_rows):
            return self.embedding.words.weight.new_zeros(0, self.config.regions.channels)
        if self.fast_rcnn is not None:
            return self.fast_rcnn(batch)
        wanted = (int(batch.region_mask[batch.picture_rows].sum()), self.config.regions.channels)
        if tuple(batch.features.shape) != wanted:
            raise ValueError(
                f"the batch with sample {batch.keys[0]} has features {tuple(batch.features.shape)}, the model takes "
                f"{wanted} precomputed ones; detect with --keep-features, or set model.regions.features=end_to_end"
            )
        return batch.features.to(self.embedding.visual.weight.dtype)

    def _save_pretrained(self, save_directory: Path) -> None:
        tensors = {f"vlbert.{name}": tensor for name, tensor in self.state_dict().items()}
        (save_directory / VOCABULARY).unlink(missing_ok=True)  # that of a model which this one replaces
        for name, data in model_files(tensors, self.config, self.vocab_size, self.vocabulary).items():
            (save_directory / name).write_bytes(data)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
    ) -> "VLBert":
        """The model of a local folder or, by name, of the Hugging Face hub; in eval mode, on the CPU, float32.

        revision, cache_dir, force_download, local_files_only and token are those of `hf_hub_download`. ValueError where
        there is no model, or one of another version of this code.
        """
        folder = Path(pretrained_model_name_or_path)
        if not folder.is_dir():
            folder = download_model(
                str(pretrained_model_name_or_path),
                revision=revision,
                cache_dir=cache_dir,
                force_download=force_download,
                local_files_only=local_files_only,
                token=token,
            )
        saved = read_model(folder)
        model = cls(saved.model_config, saved.vocab_size, saved.vocabulary)
        load_model(model, saved.part("vlbert."), saved.where)
        return model.eval()


def download_model(name: str, **options: Any) -> Path:
    """The folder with the files of a model of the hub; ValueError where there is none of that name."""
    try:
        folder = Path(hf_hub_download(name, CONFIG, **options)).parent
        options["revision"] = folder.name  # the same commit for all files, whatever is pushed meanwhile
        try:
            hf_hub_download(name, VOCABULARY, **options)
        except EntryNotFoundError as error:  # a model may come without its vocabulary
            if isinstance(error, LocalEntryNotFoundError) and not options["local_files_only"]:
                raise  # the hub was out of reach
        hf_hub_download(name, MODEL, **options)
    except (HFValidationError, EntryNotFoundError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{name} is neither a folder nor a model on the hub ({reason})") from error
    return folder


class Pooler(nn.Module):
    """BERT's summary of a row: tanh of a linear layer at [CLS], [N, T, C] -> [N, C]."""

    def __init__(self, hidden: int):
        super().__init__()
        self.dense = nn.Linear(hidden, hidden)

    def forward(self, text: Tensor) -> Tensor:
        return self.dense(text[:, 0]).tanh()


class HeadTransform(nn.Module):
    """Dense, GELU and, at words, LayerNorm: what stands before every classifier."""

    def __init__(self, hidden: int, normed: bool):
        super().__init__()
        self.dense = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden, eps=LAYER_NORM_EPS) if normed else None

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.dense(x))
        return x if self.norm is None else self.norm(x)


class Classifier(nn.Module):
    """Logits [..., outputs] from vectors [..., C], the head of a fine-tuned task.

    kind: "linear"; "two_layers", with ReLU between them; "words" or "regions", a linear layer behind the transform that
    pre-training has before its classifier of words or regions, from which it may start. Dropout before each layer.
    """

    def __init__(self, config: ModelConfig, outputs: int, kind: ClassifierKind, dropout: float, width: int = 1024):
        super().__init__()
        self.transform = HeadTransform(config.hidden, kind == "words") if kind in ("words", "regions") else None
        self.first = nn.Linear(config.hidden, width) if kind == "two_layers" else None
        self.output = nn.Linear(width if kind == "two_layers" else config.hidden, outputs)
        self.dropout = nn.Dropout(dropout)
        self.start_from = {"transform": f"{kind.removesuffix('s')}_transform"} if self.transform else {}
        initialise_head(self, config)

    def forward(self, x: Tensor) -> Tensor:
        if self.transform is not None:
            x = self.transform(x)
        if self.first is not None:
            x = self.first(self.dropout(x)).relu()
        return self.output(self.dropout(x))


def initialise(module: nn.Module, standard_deviation: float) -> None:
    """BERT's rule: linear and embedding weights from N(0, standard_deviation), biases 0, LayerNorms 1 and 0."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=standard_deviation)
        if isinstance(part, nn.LayerNorm):
            nn.init.ones_(part.weight)
        if isinstance(part, nn.Linear | nn.LayerNorm):
            nn.init.zeros_(part.bias)


def initialise_head(head: nn.Module, config: ModelConfig) -> None:
    """What fine-tuning adds: as the rest of the model (paper 4.1), its linear layers by Glorot's rule as published."""
    initialise(head, config.initializer_range)
    if config.head_initialisation == "xavier":
        for part in head.modules():
            if isinstance(part, nn.Linear):
                nn.init.xavier_uniform_(part.weight)


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """(all, trainable) numbers in the parameters of `module`."""
    return sum(p.numel() for p in module.parameters()), sum(p.numel() for p in module.parameters() if p.requires_grad)


class TaskModel(nn.Module):
    """VL-BERT with the head of a task: what DDP wraps and a checkpoint holds."""

    def __init__(self, vlbert: VLBert, task: "Task"):
        super().__init__()
        self.vlbert = vlbert
        self.task = task
        self.head = task.head(vlbert.config)

    def forward(self, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        """The task's losses: name -> (sum, count)."""
        return self.task.losses(self.vlbert, self.head, self.vlbert(batch), batch)

    def predict(self, batch: Batch) -> list[dict]:
        """The task's predictions, one dict a row."""
        return self.task.predictions(self.vlbert, self.head, self.vlbert(batch), batch)
