"""VLBert: a batch of captions and pictures in, contextual vectors of words and regions out."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from vlbert.batch import Batch
from vlbert.config import ModelConfig
from vlbert.embedding import LAYER_NORM_EPS, VisualLinguisticEmbedding
from vlbert.regions import FastRCNN
from vlbert.transformer import Encoder

if TYPE_CHECKING:
    from vlbert.tasks import Task


@dataclass(frozen=True, eq=False)
class Encoded:
    """What the encoder says: text [N, T, C], regions [N, R, C]. Padding means nothing; the masks are the batch's."""

    text: Tensor
    regions: Tensor


class VLBert(nn.Module):
    """Fast R-CNN features, the visual-linguistic embedding and the encoder (paper, figure 1)."""

    def __init__(self, config: ModelConfig, vocab_size: int):
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.fast_rcnn = FastRCNN(config.regions)
        self.embedding = VisualLinguisticEmbedding(config, vocab_size, self.fast_rcnn.channels)
        self.encoder = Encoder(config)
        initialise(self.embedding, config.initializer_range)
        initialise(self.encoder, config.initializer_range)
        self.embedding.initialise()

    def forward(self, batch: Batch) -> Encoded:
        """Batch (see vlbert/batch.py) -> Encoded. ValueError where a row is longer than the position table."""
        if batch.tokens.shape[1] + 2 > self.config.max_positions:
            row = int(batch.text_mask.sum(dim=1).argmax())
            raise ValueError(
                f"sample {batch.keys[row]}: {batch.tokens.shape[1]} word pieces, regions and [END] need "
                f"{batch.tokens.shape[1] + 2} positions, the model has max_positions = {self.config.max_positions}"
            )
        appearance = (
            self.fast_rcnn(batch)
            if len(batch.picture_rows)
            else self.embedding.words.weight.new_zeros(0, self.fast_rcnn.channels)
        )
        embedded, mask = self.embedding(batch, appearance)
        encoded = self.encoder(embedded, mask)
        t, r = batch.tokens.shape[1], batch.region_mask.shape[1]
        return Encoded(text=encoded[:, :t], regions=encoded[:, t : t + r])


class HeadTransform(nn.Module):
    """Dense, GELU and, at words, LayerNorm: what stands before every classifier."""

    def __init__(self, hidden: int, normed: bool):
        super().__init__()
        self.dense = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden, eps=LAYER_NORM_EPS) if normed else None

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.dense(x))
        return x if self.norm is None else self.norm(x)


def initialise(module: nn.Module, standard_deviation: float) -> None:
    """BERT's rule: linear and embedding weights from N(0, standard_deviation), biases 0, LayerNorms 1 and 0."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=standard_deviation)
        if isinstance(part, nn.LayerNorm):
            nn.init.ones_(part.weight)
        if isinstance(part, nn.Linear | nn.LayerNorm):
            nn.init.zeros_(part.bias)


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
