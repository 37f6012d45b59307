"""The encoder: post-norm layers of multi-head attention and feed-forward (paper 3.1, equations 1 to 4; ViLBERT 2.2).

Padding is not computed: layers read the real elements alone, packed one behind the other, row by row. Shape letters,
besides those of vlbert/data/batch.py:

    S  elements of a padded row                       L  real elements, over all rows
    s  real elements of the longest row               E  elements of a padded row of the regions' stream
    A  width of queries, keys and values              C'  width of the regions' stream; C with layers J
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.precision import compute_dtype
from vlbert.config import ModelConfig, StreamSize

LAYER_NORM_EPS = 1e-12


@dataclass(frozen=True, eq=False)
class Streams:
    """Text and regions apart, each padded: what the encoder reads and what it returns.

    text     float [N, T, C]    text_mask    bool [N, T]  which elements are real
    regions  float [N, E, C']   region_mask  bool [N, E]  likewise; with VL-BERT's [END], the last element, E = R + 1
    text_lengths, region_lengths  how many elements of each row are real, N numbers of the host (Sizes in
                                  vlbert/data/batch.py)
    """

    text: Tensor
    regions: Tensor
    text_mask: Tensor
    region_mask: Tensor
    text_lengths: Sequence[int]
    region_lengths: Sequence[int]

    def joined(self) -> tuple[Tensor, Tensor, list[int]]:
        """Both as one stream, in each row the text and then the regions: float [N, T + E, C], mask bool [N, T + E], and
        how many elements of each row are real."""
        return (
            torch.cat([self.text, self.regions], dim=1),
            torch.cat([self.text_mask, self.region_mask], dim=1),
            [sum(both) for both in zip(self.text_lengths, self.region_lengths, strict=True)],
        )


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """How much the elements of one stream attend to those of another in one layer.

    layer    number of the layer, from 0, and its letter
    queries  whose elements attend: "both" is the text and then the regions
    keys     to whose
    weights  float [N, heads, elements of queries, elements of keys]. A row sums to 1, padding receives 0. Where a row
             of the batch has no key, all is 0
    """

    layer: int
    letter: str
    queries: Literal["both", "text", "regions"]
    keys: Literal["both", "text", "regions"]
    weights: Tensor


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the real elements of padded rows lie; made once for all layers that read these rows.

    real       bool [N, S]  which elements are real
    chosen     int64 [L]    index of each real element in [N * S]
    positions  int64 [L]    index of each in [N * s]: in rows without gaps, as attention takes them
    filled     bool [N, s]  which positions of those rows hold an element
    key_mask   [N, 1, 1, s]  what attention adds before its softmax: 0 where it may read, elsewhere -inf; None: it may
               read all. A row without any element has zeros to read, since a softmax over nothing is NaN
    """

    real: Tensor
    chosen: Tensor
    positions: Tensor
    filled: Tensor
    key_mask: Tensor | None

    @classmethod
    def of(cls, real: Tensor, lengths: Sequence[int], dtype: torch.dtype) -> "Packing":
        """lengths: how many elements of each row are real. The host knows them, so nothing waits for the device.
        dtype: what attention computes in."""
        count, longest = sum(lengths), max(1, *lengths)
        filled = torch.arange(longest, device=real.device) < real.sum(dim=1, keepdim=True)
        key_mask = None
        if count < filled.numel():
            closed = ~filled & filled.any(dim=1, keepdim=True)
            key_mask = torch.zeros_like(closed, dtype=dtype).masked_fill_(closed, -torch.inf)[:, None, None, :]
        chosen, positions = (mask.flatten().nonzero_static(size=count)[:, 0] for mask in (real, filled))
        return cls(real, chosen, positions, filled, key_mask)

    @property
    def full(self) -> bool:
        """Whether all rows are as long as the longest."""
        return self.key_mask is None

    def pack(self, x: Tensor) -> Tensor:
        """[N, S, C] -> [L, C]."""
        return x.flatten(0, 1).index_select(0, self.chosen)

    def unpack(self, x: Tensor) -> Tensor:
        """[L, C] -> [N, S, C], zero in the padding."""
        return (
            x.new_zeros(self.real.numel(), x.shape[1]).index_copy(0, self.chosen, x).view(*self.real.shape, x.shape[1])
        )

    def rows(self, x: Tensor) -> Tensor:
        """[L, C] -> [N, s, C], zero behind the end of a row."""
        if not self.full:
            x = x.new_zeros(self.filled.numel(), x.shape[1]).index_copy(0, self.positions, x)
        return x.view(*self.filled.shape, x.shape[1])

    def from_rows(self, x: Tensor) -> Tensor:
        """[N, s, C] -> [L, C]."""
        return x.flatten(0, 1) if self.full else x.flatten(0, 1).index_select(0, self.positions)

    def widen(self, maps: Tensor, keys: "Packing") -> Tensor:
        """Attention maps [N, heads, s, s'] of these queries to those keys -> [N, heads, S, S'].

        Padding receives 0. A query in the padding has the row of the element before it.
        """
        query, key = ((real.cumsum(dim=1) - 1).clamp(min=0) for real in (self.real, keys.real))  # (N, S), (N, S')
        wide = maps.take_along_dim(query[:, None, :, None], dim=2).take_along_dim(key[:, None, None, :], dim=3)
        return wide.masked_fill(~keys.real[:, None, None, :], 0.0)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Packing,
    keys: Packing,
    dropout: float,
    maps: list[Tensor] | None = None,
) -> Tensor:
    """Multi-head attention to elements of the same row -> [L, A], zero where a row has no key.

    query    [N, heads, s, A/heads], by the packing `queries`
    key      [N, heads, s', A/heads], by the packing `keys`, and value likewise
    maps     where given, how much each element attends to each is added to it: [N, heads, s, s']
    """
    mask = keys.key_mask
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
    if maps is not None:
        scores = query @ key.transpose(2, 3) / query.shape[3] ** 0.5
        maps.append((scores if mask is None else scores + mask).softmax(dim=3))
    return queries.from_rows(attended.transpose(1, 2).flatten(2))


class StreamLayer(nn.Module):
    """What a layer does to one stream: projections before the attention, and all that comes behind it."""

    def __init__(self, size: StreamSize, attention_size: int, num_heads: int, dropout: float):
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(size.hidden_size, attention_size)
        self.key = nn.Linear(size.hidden_size, attention_size)
        self.value = nn.Linear(size.hidden_size, attention_size)
        self.attention_output = nn.Linear(attention_size, size.hidden_size)
        self.attention_norm = nn.LayerNorm(size.hidden_size, eps=LAYER_NORM_EPS)
        self.intermediate = nn.Linear(size.hidden_size, size.intermediate_size)
        self.output = nn.Linear(size.intermediate_size, size.hidden_size)
        self.output_norm = nn.LayerNorm(size.hidden_size, eps=LAYER_NORM_EPS)
        self.dropout = nn.Dropout(dropout)

    @property
    def attention_dropout(self) -> float:
        return self.dropout.p if self.training else 0.0

    def projected(self, x: Tensor, packing: Packing) -> tuple[Tensor, ...]:
        """x [L, C] -> queries, keys and values, [N, heads, s, A/heads] each: one product for all three."""
        parts = (self.query, self.key, self.value)
        weight, bias = torch.cat([one.weight for one in parts]), torch.cat([one.bias for one in parts])
        rows = packing.rows(F.linear(x, weight, bias))  # (N, s, 3 A)
        return rows.unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind()

    def behind_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """x [L, C] and what its elements read [L, A] -> [L, C]."""
        x = self.attention_norm(x + self.dropout(self.attention_output(attended)))
        return self.output_norm(x + self.dropout(self.output(F.gelu(self.intermediate(x)))))


class SelfAttentionLayer(StreamLayer):
    """Letters J, T and V: every element attends to every real element of its row, of both streams, of the text, or of
    the regions."""

    def __init__(self, size: StreamSize, dropout: float):
        super().__init__(size, size.hidden_size, size.num_heads, dropout)

    def forward(self, x: Tensor, packing: Packing, maps: list[Tensor] | None = None) -> Tensor:
        """x [L, C] -> [L, C]; maps as in `attend`."""
        attended = attend(*self.projected(x, packing), packing, packing, self.attention_dropout, maps)
        return self.behind_attention(x, attended)


class CoAttentionLayer(nn.Module):
    """Letter X: each word attends to the regions of its row and each region to the words, both as they come in
    (ViLBERT 2.2)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        size, heads = config.coattention.hidden_size, config.coattention.num_heads
        self.text = StreamLayer(config.text_stream, size, heads, config.dropout)
        self.regions = StreamLayer(config.regions_stream, size, heads, config.dropout)

    def forward(
        self, text: Tensor, regions: Tensor, of_text: Packing, of_regions: Packing, maps: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """text [L, C], regions [L', C'] -> the same. maps: as in `attend`, of the words and then of the regions."""
        rate = self.text.attention_dropout
        words, boxes = self.text.projected(text, of_text), self.regions.projected(regions, of_regions)
        by_words = attend(words[0], *boxes[1:], of_text, of_regions, rate, maps)
        by_regions = attend(boxes[0], *words[1:], of_regions, of_text, rate, maps)
        return self.text.behind_attention(text, by_words), self.regions.behind_attention(regions, by_regions)


def make_layer(letter: str, config: ModelConfig) -> SelfAttentionLayer | CoAttentionLayer:
    """The layer that a letter of ModelConfig.layers stands for."""
    if letter == "X":
        return CoAttentionLayer(config)
    return SelfAttentionLayer(config.regions_stream if letter == "V" else config.text_stream, config.dropout)


class Encoder(nn.Module):
    """The layers that `ModelConfig.layers` spells."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.letters = config.layers
        self.layers = nn.ModuleList(make_layer(letter, config) for letter in config.layers)

    def forward(
        self,
        streams: Streams,
        attentions: list[AttentionMap] | None = None,
        hidden_states: list[Streams] | None = None,
    ) -> Streams:
        """The same streams after all layers, zero in the padding.

        Where lists are given, each layer adds to them: its attention maps, of which X has two, of the text and of the
        regions; and the streams that it returns.
        """
        for joint, numbers in groupby(range(len(self.layers)), lambda number: self.letters[number] == "J"):
            streams = (self._joint if joint else self._apart)(streams, numbers, attentions, hidden_states)
        return streams

    def _joint(
        self,
        streams: Streams,
        numbers: Iterable[int],
        attentions: list[AttentionMap] | None,
        hidden_states: list[Streams] | None,
    ) -> Streams:
        """Neighbouring layers J, which read both streams as one."""
        x, mask, lengths = streams.joined()
        packing = Packing.of(mask, lengths, compute_dtype(x))
        packed = packing.pack(x)
        for number in numbers:
            maps = None if attentions is None else []
            packed = self.layers[number](packed, packing, maps)
            if attentions is not None:
                attentions.append(AttentionMap(number, "J", "both", "both", packing.widen(maps[0], packing)))
            if hidden_states is not None:
                hidden_states.append(_split(packing.unpack(packed), streams))
        return _split(packing.unpack(packed), streams)

    def _apart(
        self,
        streams: Streams,
        numbers: Iterable[int],
        attentions: list[AttentionMap] | None,
        hidden_states: list[Streams] | None,
    ) -> Streams:
        """Neighbouring layers T, V and X, which read each stream by itself."""
        of = {
            "text": Packing.of(streams.text_mask, streams.text_lengths, compute_dtype(streams.text)),
            "regions": Packing.of(streams.region_mask, streams.region_lengths, compute_dtype(streams.regions)),
        }
        x = {name: packing.pack(getattr(streams, name)) for name, packing in of.items()}
        for number in numbers:
            letter, layer = self.letters[number], self.layers[number]
            maps = None if attentions is None else []
            if letter == "X":
                x["text"], x["regions"] = layer(x["text"], x["regions"], of["text"], of["regions"], maps)
                pairs = [("text", "regions"), ("regions", "text")]
            else:
                name = "text" if letter == "T" else "regions"
                x[name] = layer(x[name], of[name], maps)
                pairs = [(name, name)]
            for (queries, keys), weights in zip(pairs, maps or [], strict=False):
                attentions.append(AttentionMap(number, letter, queries, keys, of[queries].widen(weights, of[keys])))
            if hidden_states is not None:
                hidden_states.append(_unpacked(x, of, streams))
        return _unpacked(x, of, streams)


def _split(both: Tensor, like: Streams) -> Streams:
    """The streams that `Streams.joined` had joined, [N, T + E, C]."""
    text, regions = both.split([like.text.shape[1], like.regions.shape[1]], dim=1)
    return dataclasses.replace(like, text=text, regions=regions)


def _unpacked(x: dict[str, Tensor], of: dict[str, Packing], like: Streams) -> Streams:
    return dataclasses.replace(like, **{name: packing.unpack(x[name]) for name, packing in of.items()})
