"""The encoder: post-norm Transformer layers (paper 3.1, equations 1 to 4; ViLBERT 2.2).

Nothing is computed for padding: layers get only the real elements, packed row after row. Shape letters, in addition to
those of vlbert/data/batch.py:

    S  elements of a padded row                       L  real elements, in all rows
    s  real elements of the longest row               E  elements of a padded row of the region stream
    A  width of queries, keys and values              C'  width of the region stream; C in joint layers
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

Stream = Literal["both", "text", "regions"]
_STREAM_OF: dict[str, Stream] = {"J": "both", "T": "text", "V": "regions"}  # by the letter of a layer


@dataclass(frozen=True, eq=False)
class Streams:
    """The padded text and regions that enter or leave the encoder.

    Attributes:
        text: float [N, T, C].
        regions: float [N, E, C']. In VL-BERT, E = R + 1, and the last element is [END].
        text_mask, region_mask: bool [N, T] and [N, E], True at real elements.
        text_lengths, region_lengths: number of real elements in each row, as Python integers.
    """

    text: Tensor
    regions: Tensor
    text_mask: Tensor
    region_mask: Tensor
    text_lengths: Sequence[int]
    region_lengths: Sequence[int]

    def joined(self) -> tuple[Tensor, Tensor, list[int]]:
        """Concatenate each row's text and regions. Returns the result [N, T + E, C], its mask, and the row lengths."""
        return (
            torch.cat([self.text, self.regions], dim=1),
            torch.cat([self.text_mask, self.region_mask], dim=1),
            [sum(lengths) for lengths in zip(self.text_lengths, self.region_lengths, strict=True)],
        )


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """Attention weights of one layer.

    Attributes:
        layer: index of the layer, counted from 0.
        letter: kind of the layer, as in ModelConfig.layers.
        queries: stream whose elements attend; "both" means the text followed by the regions.
        keys: stream whose elements are attended to.
        weights: float [N, heads, queries, keys]. The weights of each query sum to 1 and are 0 at padded keys. In rows
            without any keys, all weights are 0.
    """

    layer: int
    letter: str
    queries: Stream
    keys: Stream
    weights: Tensor


@dataclass(frozen=True, eq=False)
class Packing:
    """Indices for converting padded rows [N, S] to packed elements [L], and packed elements to compact rows [N, s].

    Attention reads compact rows. In them, real elements come first, and the padding is as short as possible.

    Attributes:
        real: bool [N, S], True at real elements.
        chosen: int64 [L], index of each real element in the padded rows, flattened to [N * S].
        positions: int64 [L], index of each real element in the compact rows, flattened to [N * s].
        filled: bool [N, s], True at real elements of the compact rows.
        key_mask: float [N, 1, 1, s], added to the attention scores: 0 at real elements, -inf at padding. It is all 0 in
            rows without real elements, because the softmax of only -inf is NaN. None if no compact row has padding.
    """

    real: Tensor
    chosen: Tensor
    positions: Tensor
    filled: Tensor
    key_mask: Tensor | None

    @classmethod
    def of(cls, real: Tensor, lengths: Sequence[int], dtype: torch.dtype) -> "Packing":
        """Make the packing of padded rows.

        Args:
            real: bool [N, S], True at real elements.
            lengths: number of real elements in each row. Reading them from `real` would make the CPU wait for the GPU.
            dtype: type in which attention is computed.
        """
        count, longest = sum(lengths), max(1, *lengths)
        filled = torch.arange(longest, device=real.device) < real.sum(dim=1, keepdim=True)
        key_mask = None
        if count < filled.numel():
            closed = ~filled & filled.any(dim=1, keepdim=True)
            key_mask = torch.zeros_like(closed, dtype=dtype).masked_fill_(closed, -torch.inf)[:, None, None, :]
        chosen, positions = (mask.flatten().nonzero_static(size=count)[:, 0] for mask in (real, filled))
        return cls(real, chosen, positions, filled, key_mask)

    def pack(self, x: Tensor) -> Tensor:
        """Drop the padding: [N, S, C] -> [L, C]."""
        return x.flatten(0, 1).index_select(0, self.chosen)

    def unpack(self, x: Tensor) -> Tensor:
        """Undo `pack`: [L, C] -> [N, S, C], zero in the padding."""
        rows = x.new_zeros(self.real.numel(), x.shape[1]).index_copy(0, self.chosen, x)
        return rows.view(*self.real.shape, x.shape[1])

    def rows(self, x: Tensor) -> Tensor:
        """Put packed elements into compact rows: [L, C] -> [N, s, C], zero in the padding."""
        if self.key_mask is not None:
            x = x.new_zeros(self.filled.numel(), x.shape[1]).index_copy(0, self.positions, x)
        return x.view(*self.filled.shape, x.shape[1])

    def from_rows(self, x: Tensor) -> Tensor:
        """Undo `rows`: [N, s, C] -> [L, C]."""
        return x.flatten(0, 1) if self.key_mask is None else x.flatten(0, 1).index_select(0, self.positions)

    def widen(self, maps: Tensor, keys: "Packing") -> Tensor:
        """Expand attention maps from compact to padded rows: [N, heads, s, s'] -> [N, heads, S, S'].

        `self` packs the queries, and `keys` packs the keys. Padded keys get the weight 0. A padded query gets
        the weights of the last real query before it.
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
    """Return the results of multi-head attention within each row: [L, A], zero in rows without keys.

    Args:
        query: [N, heads, s, A/heads], in the compact rows of `queries`.
        key, value: [N, heads, s', A/heads], in the compact rows of `keys`.
        maps: list to which the attention weights [N, heads, s, s'] are appended, if given.
    """
    mask = keys.key_mask
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
    if maps is not None:
        scores = query @ key.transpose(2, 3) / query.shape[3] ** 0.5
        maps.append((scores if mask is None else scores + mask).softmax(dim=3))
    return queries.from_rows(attended.transpose(1, 2).flatten(2))


class StreamLayer(nn.Module):
    """The part of a layer that works on one stream: the projections before attention, and everything after it."""

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

    def project(self, x: Tensor, packing: Packing) -> tuple[Tensor, ...]:
        """Project packed elements [L, C] to queries, keys and values. Each is [N, heads, s, A/heads]."""
        parts = (self.query, self.key, self.value)
        weight, bias = torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])
        rows = packing.rows(F.linear(x, weight, bias))  # (N, s, 3 A)
        return rows.unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind()

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output [L, C], given its input x [L, C] and the result of attention [L, A]."""
        x = self.attention_norm(x + self.dropout(self.attention_output(attended)))
        return self.output_norm(x + self.dropout(self.output(F.gelu(self.intermediate(x)))))


class SelfAttentionLayer(StreamLayer):
    """A layer of self-attention within each row: over both streams (J), the text (T) or the regions (V)."""

    def __init__(self, size: StreamSize, dropout: float):
        super().__init__(size, size.hidden_size, size.num_heads, dropout)

    def forward(self, x: Tensor, packing: Packing, maps: list[Tensor] | None = None) -> Tensor:
        """Apply the layer to packed elements [L, C]. If `maps` is given, the attention weights are appended to it."""
        attended = attend(*self.project(x, packing), packing, packing, self.attention_dropout, maps)
        return self.after_attention(x, attended)


class CoAttentionLayer(nn.Module):
    """A layer (X) in which words attend to the regions of their row, and regions attend to its words (ViLBERT 2.2)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        size, heads = config.coattention.hidden_size, config.coattention.num_heads
        self.text = StreamLayer(config.text_stream, size, heads, config.dropout)
        self.regions = StreamLayer(config.regions_stream, size, heads, config.dropout)

    def forward(
        self, text: Tensor, regions: Tensor, text_pack: Packing, region_pack: Packing, maps: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Apply the layer to packed text [L, C] and regions [L', C'].

        If `maps` is given, the attention weights of the text are appended to it, and then those of the regions.
        """
        rate = self.text.attention_dropout
        words, boxes = self.text.project(text, text_pack), self.regions.project(regions, region_pack)
        text_attended = attend(words[0], *boxes[1:], text_pack, region_pack, rate, maps)
        regions_attended = attend(boxes[0], *words[1:], region_pack, text_pack, rate, maps)
        return self.text.after_attention(text, text_attended), self.regions.after_attention(regions, regions_attended)


def make_layer(letter: str, config: ModelConfig) -> SelfAttentionLayer | CoAttentionLayer:
    if letter == "X":
        return CoAttentionLayer(config)
    return SelfAttentionLayer(config.regions_stream if letter == "V" else config.text_stream, config.dropout)


class Encoder(nn.Module):
    """The encoder: one layer for each letter of `ModelConfig.layers`."""

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
        """Return the streams after all layers. Their padding is zero.

        Args:
            attentions: list to which each layer appends its map; co-attention appends the text's, then the regions'.
            hidden_states: list to which each layer appends its output.
        """
        for joint, numbers in groupby(range(len(self.layers)), lambda number: self.letters[number] == "J"):
            streams = self._run(streams, joint, numbers, attentions, hidden_states)
        return streams

    def _run(
        self,
        streams: Streams,
        joint: bool,
        numbers: Iterable[int],
        attentions: list[AttentionMap] | None,
        hidden_states: list[Streams] | None,
    ) -> Streams:
        """Run the layers with the consecutive indices `numbers`.

        If `joint`, all of them are joint layers (J) and run on the concatenated text and regions. Otherwise, they are
        text layers (T), region layers (V) and co-attention layers (X), and run on separate streams.
        """
        padded: dict[Stream, tuple[Tensor, Tensor, Sequence[int]]] = {
            "text": (streams.text, streams.text_mask, streams.text_lengths),
            "regions": (streams.regions, streams.region_mask, streams.region_lengths),
        }
        if joint:
            padded = {"both": streams.joined()}
        packs = {name: Packing.of(mask, lengths, compute_dtype(x)) for name, (x, mask, lengths) in padded.items()}
        x = {name: packs[name].pack(values) for name, (values, _, _) in padded.items()}
        for number in numbers:
            letter, layer = self.letters[number], self.layers[number]
            maps = None if attentions is None else []
            if letter == "X":
                x["text"], x["regions"] = layer(x["text"], x["regions"], packs["text"], packs["regions"], maps)
                pairs: list[tuple[Stream, Stream]] = [("text", "regions"), ("regions", "text")]
            else:
                name: Stream = _STREAM_OF[letter]
                x[name] = layer(x[name], packs[name], maps)
                pairs = [(name, name)]
            if attentions is not None and maps:
                for (query, key), weights in zip(pairs, maps, strict=True):
                    attentions.append(AttentionMap(number, letter, query, key, packs[query].widen(weights, packs[key])))
            if hidden_states is not None:
                hidden_states.append(_unpack_streams(x, packs, streams))
        return _unpack_streams(x, packs, streams)


def _unpack_streams(x: dict[Stream, Tensor], packs: dict[Stream, Packing], like: Streams) -> Streams:
    padded = {name: packing.unpack(x[name]) for name, packing in packs.items()}
    if "both" in padded:
        sizes = [like.text.shape[1], like.regions.shape[1]]
        padded["text"], padded["regions"] = padded.pop("both").split(sizes, dim=1)
    return dataclasses.replace(like, **padded)
