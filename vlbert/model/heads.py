"""Parts of the tasks' heads: the pooler, the transform and the classifiers; and how weights are initialised."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from vlbert.config import ModelConfig
from vlbert.model.layers import LAYER_NORM_EPS

ClassifierKind = Literal["linear", "two_layers", "words", "regions"]


class Pooler(nn.Module):
    """BERT's summary of a row: tanh of a linear layer at [CLS], [N, T, C] -> [N, C]."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, text: Tensor) -> Tensor:
        return self.dense(text[:, 0]).tanh()


class HeadTransform(nn.Module):
    """Dense, GELU and, at words, LayerNorm: before every classifier."""

    def __init__(self, hidden_size: int, normed: bool):
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.norm = nn.LayerNorm(hidden_size, eps=LAYER_NORM_EPS) if normed else None

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
        self.transform = HeadTransform(config.hidden_size, kind == "words") if kind in ("words", "regions") else None
        self.first = nn.Linear(config.hidden_size, width) if kind == "two_layers" else None
        self.output = nn.Linear(width if kind == "two_layers" else config.hidden_size, outputs)
        self.dropout = nn.Dropout(dropout)
        self.init_from = {"transform": f"{kind.removesuffix('s')}_transform"} if self.transform else {}
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
