"""BERT's encoder: post-norm layers of multi-head attention and feed-forward (paper 3.1, equations 1 to 4).

Padding is not computed: the elements that are real lie one behind the other, row by row. Shape letters, besides those
of vlbert/data/batch.py:

    S  elements of a padded row, gaps included        L  real elements, over all rows
    s  real elements of the longest row
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlbert.config import ModelConfig
from vlbert.model.embedding import LAYER_NORM_EPS


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the real elements of a batch lie; made once for all layers.

    real    bool [N, S]   which elements are real
    chosen  int64 [L]     of each real element, its place in [N * S]
    places  int64 [L]     of each, its place in [N * s]: in rows without gaps, as attention takes them
    filled  bool [N, s]   which places of those rows are taken
    full    whether all are
    """

    real: Tensor
    chosen: Tensor
    places: Tensor
    filled: Tensor
    full: bool

    @classmethod
    def of(cls, real: Tensor) -> "Packing":
        chosen = real.flatten().nonzero()[:, 0]
        lengths = real.sum(dim=1)
        longest = int(lengths.max())
        filled = torch.arange(longest, device=real.device) < lengths[:, None]
        return cls(real, chosen, filled.flatten().nonzero()[:, 0], filled, len(chosen) == filled.numel())

    def pack(self, x: Tensor) -> Tensor:
        """[N, S, C] -> [L, C]."""
        return x.flatten(0, 1).index_select(0, self.chosen)

    def unpack(self, x: Tensor) -> Tensor:
        """[L, C] -> [N, S, C], zero where no element is."""
        return x.new_zeros(self.real.numel(), x.shape[1]).index_copy(0, self.chosen, x).view(*self.real.shape, -1)

    def rows(self, x: Tensor) -> Tensor:
        """[L, C] -> [N, s, C], zero behind the end of a row."""
        if not self.full:
            x = x.new_zeros(self.filled.numel(), x.shape[1]).index_copy(0, self.places, x)
        return x.view(*self.filled.shape, -1)

    def from_rows(self, x: Tensor) -> Tensor:
        """[N, s, C] -> [L, C]."""
        return x.flatten(0, 1) if self.full else x.flatten(0, 1).index_select(0, self.places)

    def widen(self, maps: Tensor) -> Tensor:
        """Attention maps [N, heads, s, s] -> [N, heads, S, S]: nothing to padding; from padding, what the element
        before it has, so that every row sums to 1."""
        place = (self.real.cumsum(dim=1) - 1).clamp(min=0)  # (N, S)
        wide = maps.take_along_dim(place[:, None, :, None], dim=2).take_along_dim(place[:, None, None, :], dim=3)
        return wide.masked_fill(~self.real[:, None, None, :], 0.0)


class JointLayer(nn.Module):
    """Letter J: every element attends to every real element of its row, words and regions alike."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.attention_output = nn.Linear(config.hidden_size, config.hidden_size)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS)
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)
        self.output_norm = nn.LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, packing: Packing, attentions: list[Tensor] | None = None) -> Tensor:
        """x [L, C] -> [L, C].

        Where a list is given, how much each element attends to each is added to it: [N, heads, s, s]; that of a real
        element sums to 1.
        """

        def split(projected: Tensor) -> Tensor:
            return packing.rows(projected).unflatten(2, (self.num_heads, -1)).transpose(1, 2)  # (N, heads, s, C/heads)

        query, key, value = split(self.query(x)), split(self.key(x)), split(self.value(x))
        to = None if packing.full else packing.filled[:, None, None, :]
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=to, dropout_p=self.dropout.p if self.training else 0.0
        )
        if attentions is not None:
            scores = query @ key.transpose(2, 3) / query.shape[3] ** 0.5
            attentions.append((scores if to is None else scores.masked_fill(~to, -torch.inf)).softmax(dim=3))
        attended = packing.from_rows(attended.transpose(1, 2).flatten(2))
        x = self.attention_norm(x + self.dropout(self.attention_output(attended)))
        return self.output_norm(x + self.dropout(self.output(F.gelu(self.intermediate(x)))))


LAYERS = {"J": JointLayer}  # letters of ModelConfig.layers


class Encoder(nn.Module):
    """The layers that `ModelConfig.layers` spells."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.layers = nn.ModuleList(LAYERS[letter](config) for letter in config.layers)

    def forward(self, x: Tensor, mask: Tensor, attentions: list[Tensor] | None = None) -> Tensor:
        """x [N, S, C], mask bool [N, S] of the elements that are real -> [N, S, C], zero where none is.

        Where a list is given, the attention map of each layer is added to it: [N, heads, S, S], rows sum to 1.
        """
        packing = Packing.of(mask)
        maps: list[Tensor] | None = None if attentions is None else []
        packed = packing.pack(x)
        for layer in self.layers:
            packed = layer(packed, packing, maps)
        if attentions is not None:
            attentions += map(packing.widen, maps)
        return packing.unpack(packed)
