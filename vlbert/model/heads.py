"""Building blocks of task heads (poolers, transforms and classifiers), and the initialisation of weights."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlbert.config import ModelConfig
from vlbert.model.layers import LAYER_NORM_EPS

ClassifierKind = Literal["linear", "two_layers", "words", "regions", "regions_norm", "weight_norm", "gelu_norm"]


class Pooler(nn.Module):
    """A module that pools each row of text and regions to one vector.

    Attributes:
        kind: pooling method, the value of ModelConfig.pooler.
        size: width P of the vector. For "product" and "sum", it is co-attention's; otherwise it is the text's.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.kind, fused = config.pooler, config.pooler in ("product", "sum")
        self.size = config.coattention.hidden_size if fused else config.hidden_size
        self.dense = None if config.pooler == "none" else nn.Linear(config.hidden_size, self.size)
        self.region_dense = nn.Linear(config.regions_stream.hidden_size, self.size) if fused else None
        self.dropout = nn.Dropout(config.dropout if fused else 0.0)

    def forward(self, text: Tensor, regions: Tensor) -> Tensor:
        """Pool text [N, T, C] and regions [N, R, C'] to vectors [N, P]."""
        if self.dense is None:
            return text[:, 0]
        if self.region_dense is None:
            return self.dense(text[:, 0]).tanh()
        pooled = self.dense(text[:, 0]).relu(), self.region_dense(regions[:, 0]).relu()
        return self.dropout(pooled[0] * pooled[1] if self.kind == "product" else pooled[0] + pooled[1])


class HeadTransform(nn.Module):
    """A dense layer with GELU, followed by LayerNorm if `normed`. It precedes the last layer of a classifier."""

    def __init__(self, hidden_size: int, normed: bool):
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.norm = nn.LayerNorm(hidden_size, eps=LAYER_NORM_EPS) if normed else None

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.dense(x))
        return x if self.norm is None else self.norm(x)


class Classifier(nn.Module):
    """A classifier for the head of a fine-tuned task. It maps vectors [..., inputs] to logits [..., outputs].

    Args:
        kind: structure of the classifier:
            "linear": one layer.
            "two_layers": two layers with ReLU between them.
            "words", "regions", "regions_norm": a HeadTransform and a layer. The transform can start from the weights of
                the pre-trained word classifier ("words") or region classifier ("regions", or "regions_norm" if it was
                trained with region_head="transform_norm").
            "weight_norm": as in ViLBERT, two weight-normalised layers with ReLU between them.
            "gelu_norm": as in ViLBERT, two layers with GELU and LayerNorm between them.
        dropout: probability before each layer except the transform. In ViLBERT's kinds: only before the second layer.
        width: number of outputs of the first layer in "two_layers". In ViLBERT's kinds, it is always 2 * inputs.
        inputs: width of the input vectors; None means the width of the text.
    """

    def __init__(
        self,
        config: ModelConfig,
        outputs: int,
        kind: ClassifierKind,
        dropout: float,
        width: int = 1024,
        inputs: int | None = None,
    ):
        super().__init__()
        inputs = config.hidden_size if inputs is None else inputs
        vilbert = kind in ("weight_norm", "gelu_norm")
        width = {"two_layers": width, "weight_norm": 2 * inputs, "gelu_norm": 2 * inputs}.get(kind, inputs)
        linear = WeightNormLinear if kind == "weight_norm" else nn.Linear
        self.transform = None
        if kind in ("words", "regions", "regions_norm"):
            self.transform = HeadTransform(inputs, normed=kind != "regions")
        self.first = linear(inputs, width) if kind == "two_layers" or vilbert else None
        self.activation = F.gelu if kind == "gelu_norm" else F.relu
        self.norm = nn.LayerNorm(width, eps=LAYER_NORM_EPS) if kind == "gelu_norm" else None
        self.output = linear(width, outputs)
        self.dropout = nn.Dropout(dropout)
        self.first_dropout = nn.Dropout(0.0 if vilbert else dropout)
        source = "word_transform" if kind == "words" else "region_transform"
        self.init_from = {"transform": source} if self.transform else {}
        initialise_head(self, config)

    def forward(self, x: Tensor) -> Tensor:
        if self.transform is not None:
            x = self.transform(x)
        if self.first is not None:
            x = self.activation(self.first(self.first_dropout(x)))
        if self.norm is not None:
            x = self.norm(x)
        return self.output(self.dropout(x))


class PairClassifier(nn.Module):
    """A Pooler followed by a Classifier. It returns one vector of logits per row."""

    def __init__(self, config: ModelConfig, outputs: int, kind: ClassifierKind, dropout: float, width: int = 1024):
        super().__init__()
        self.pooler = Pooler(config)
        initialise_head(self.pooler, config)
        self.classifier = Classifier(config, outputs, kind, dropout, width, inputs=self.pooler.size)

    def forward(self, text: Tensor, regions: Tensor) -> Tensor:
        """Return logits [N, outputs] for text [N, T, C] and regions [N, R, C']."""
        return self.classifier(self.pooler(text, regions))


class WeightNormLinear(nn.Module):
    """A linear layer with weight g v / |v|, where g is a learned scalar and |v| the Frobenius norm of the matrix v."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.direction = nn.Linear(inputs, outputs)
        self.gain = nn.Parameter(torch.empty(()))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.direction.weight
        return F.linear(x, self.gain * weight / weight.norm(), self.direction.bias)


def initialise(module: nn.Module, standard_deviation: float) -> None:
    """Initialise weights from N(0, standard_deviation), as in BERT. LayerNorm weights become 1, and biases 0."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=standard_deviation)
        if isinstance(part, nn.LayerNorm):
            nn.init.ones_(part.weight)
        if isinstance(part, nn.Linear | nn.LayerNorm):
            nn.init.zeros_(part.bias)


def initialise_head(head: nn.Module, config: ModelConfig) -> None:
    """Initialise a new head as in BERT (paper 4.1) or, if head_initialisation is "xavier", as in the published code."""
    initialise(head, config.initializer_range)
    if config.head_initialisation == "xavier":
        for part in head.modules():
            if isinstance(part, nn.Linear):
                nn.init.xavier_uniform_(part.weight)
    for part in head.modules():
        if isinstance(part, WeightNormLinear):
            part.gain.data.copy_(part.direction.weight.detach().norm())


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """Return how many parameters `module` has, and how many of them are trainable."""
    return sum(p.numel() for p in module.parameters()), sum(p.numel() for p in module.parameters() if p.requires_grad)
