"""BERT's encoder: post-norm layers of multi-head attention and feed-forward (paper 3.1, equations 1 to 4).

Padding is not computed: layers read the real elements alone, packed one behind the other, row by row. Shape letters,
besides those of vlbert/data/batch.py:

    S  elements of a padded row                       L  real elements, over all rows
    s  real elements of the longest row               E  elements of a padded row of the regions' stream
"""

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlbert.config import ModelConfig

LAYER_NORM_EPS = 1e-12


@dataclass(frozen=True, eq=False)
class Streams:
    """Text and regions apart, each padded: what the encoder reads and what it returns.

    text     float [N, T, C]    text_mask    bool [N, T]  which elements are real
    regions  float [N, E, C]    region_mask  bool [N, E]  likewise; VL-BERT's [END] is the last element, E = R + 1
    """

    text: Tensor
    regions: Tensor
    text_mask: Tensor
    region_mask: Tensor

    def joined(self) -> tuple[Tensor, Tensor]:
        """Both as one stream, in each row the text and then the regions: float [N, T + E, C], mask bool [N, T + E]."""
        return torch.cat([self.text, self.regions], dim=1), torch.cat([self.text_mask, self.region_mask], dim=1)


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the real elements of padded rows lie; made once for all layers that read these rows.

    real       bool [N, S]  which elements are real
    chosen     int64 [L]    index of each real element in [N * S]
    positions  int64 [L]    index of each in [N * s]: in rows without gaps, as attention takes them
    filled     bool [N, s]  which positions of those rows hold an element
    full       whether all do
    """

    real: Tensor
    chosen: Tensor
    positions: Tensor
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
        """[L, C] -> [N, S, C], zero in the padding."""
        return x.new_zeros(self.real.numel(), x.shape[1]).index_copy(0, self.chosen, x).view(*self.real.shape, -1)

    def rows(self, x: Tensor) -> Tensor:
        """[L, C] -> [N, s, C], zero behind the end of a row."""
        if not self.full:
            x = x.new_zeros(self.filled.numel(), x.shape[1]).index_copy(0, self.positions, x)
        return x.view(*self.filled.shape, -1)

    def from_rows(self, x: Tensor) -> Tensor:
        """[N, s, C] -> [L, C]."""
        return x.flatten(0, 1) if self.full else x.flatten(0, 1).index_select(0, self.positions)

    def widen(self, maps: Tensor) -> Tensor:
        """Attention maps [N, heads, s, s] -> [N, heads, S, S].

        Padding receives 0. A query in the padding has the row of the element before it, so that every row sums to 1.
        """
        position = (self.real.cumsum(dim=1) - 1).clamp(min=0)  # (N, S)
        wide = maps.take_along_dim(position[:, None, :, None], dim=2).take_along_dim(position[:, None, None, :], dim=3)
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


LAYERS = {"J": JointLayer}  # by letter of ModelConfig.layers


class Encoder(nn.Module):
    """The layers that `ModelConfig.layers` spells."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.layers = nn.ModuleList(LAYERS[letter](config) for letter in config.layers)

    def forward(self, streams: Streams, attentions: list[Tensor] | None = None) -> Streams:
        """The same streams after all layers, zero in the padding.

        Where a list is given, the attention map of each layer is added to it: [N, heads, T + E, T + E], rows sum to 1.
        """
        x, mask = streams.joined()  # as J reads them
        packing = Packing.of(mask)
        packed = packing.pack(x)
        maps: list[Tensor] | None = None if attentions is None else []
        for layer in self.layers:
            packed = layer(packed, packing, maps)
        if attentions is not None:
            attentions += map(packing.widen, maps)
        lengths = [streams.text.shape[1], streams.regions.shape[1]]
        text, regions = packing.unpack(packed).split(lengths, dim=1)
        return dataclasses.replace(streams, text=text, regions=regions)
