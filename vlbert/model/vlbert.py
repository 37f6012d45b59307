"""VLBert: a batch of captions and images in, contextual vectors of words and regions out."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vlbert.config import ModelConfig
from vlbert.data.batch import Batch
from vlbert.model.embedding import SeparateEmbedding, VisualLinguisticEmbedding
from vlbert.model.fast_rcnn import FastRCNN
from vlbert.model.heads import initialise
from vlbert.model.layers import AttentionMap, Encoder, Streams


@dataclass(frozen=True, eq=False)
class Encoded:
    """The contextual vectors of a batch. Those of padding mean nothing; the masks are the batch's.

    text        float [N, T, C]
    regions     float [N, R, C']           C' is C unless the model gives regions another width
    appearance  float [K, D]         the appearance feature of the real regions of all images, in image order
    attentions  where wanted: the attention maps of each layer, over the words and the regions; VL-BERT's [END] is
                the last region. A task's token is left out, so that the rows of others may sum to less than 1
    hidden_states  where wanted: text [N, T, C] and regions [N, R, C'] before the first layer and after each, zero in
                the padding behind a layer
    """

    text: Tensor
    regions: Tensor
    appearance: Tensor
    attentions: tuple[AttentionMap, ...] | None = None
    hidden_states: tuple[tuple[Tensor, Tensor], ...] | None = None


class VLBert(nn.Module):
    """Fast R-CNN features, the visual-linguistic embedding and the encoder (paper, figure 1).

    vlbert.hf loads and saves it: `VLBertModel.from_pretrained(folder, run or hub name).vlbert`.
    """

    def __init__(self, config: ModelConfig, vocab_size: int):
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.fast_rcnn = FastRCNN(config.regions) if config.regions.features == "end_to_end" else None
        embedding = SeparateEmbedding if config.embedding == "separate" else VisualLinguisticEmbedding
        self.embedding = embedding(config, vocab_size)
        self.encoder = Encoder(config)
        initialise(self.embedding, config.initializer_range)
        initialise(self.encoder, config.initializer_range)
        self.embedding.initialise()

    def forward(
        self, batch: Batch, attentions: bool = False, appearance: Tensor | None = None, hidden_states: bool = False
    ) -> Encoded:
        """Batch (see vlbert/data/batch.py) -> Encoded, with attention maps if `attentions`, and with the states of all
        layers if `hidden_states`.

        appearance: what `appearance` returned for the same images, where it is known already.

        ValueError where a row is longer than the position table, or the batch brings no features and the model takes
        precomputed ones.
        """
        needed = batch.tokens.shape[1] + self.embedding.positions_behind_text
        if needed > self.config.max_positions:
            row = batch.sizes.tokens.index(max(batch.sizes.tokens))
            raise ValueError(
                f"row {row} of the batch with sample {batch.keys[0]}: {batch.tokens.shape[1]} tokens and their image "
                f"need {needed} positions, the model has max_positions = {self.config.max_positions}"
            )
        appearance = self.appearance(batch) if appearance is None else appearance
        maps: list[AttentionMap] | None = [] if attentions else None
        embedded = self.embedding(batch, appearance)
        states: list[Streams] | None = [embedded] if hidden_states else None
        encoded = self.encoder(embedded, maps, states)
        if self.config.task_token is not None:
            maps = maps and [_without_task_of(one) for one in maps]
        return Encoded(
            *self._text_and_regions(encoded, batch),
            appearance,
            tuple(maps) if attentions else None,
            tuple(self._text_and_regions(one, batch) for one in states) if hidden_states else None,
        )

    def _text_and_regions(self, streams: Streams, batch: Batch) -> tuple[Tensor, Tensor]:
        """Without the task's token and without [END]."""
        text = streams.text if self.config.task_token is None else _without_task(streams.text, 1)
        return text, streams.regions[:, : batch.region_mask.shape[1]]

    def appearance(self, batch: Batch) -> Tensor:
        """Return the appearance features of the K real regions of the batch's images, in image order: [K, D]."""
        if not len(batch.image_rows):
            return self.embedding.words.weight.new_zeros(0, self.config.regions.channels)
        if self.fast_rcnn is not None:
            return self.fast_rcnn(batch)
        wanted = (len(batch.real_regions), self.config.regions.channels)
        if tuple(batch.features.shape) != wanted:
            raise ValueError(
                f"the batch with sample {batch.keys[0]} has features {tuple(batch.features.shape)}, the model takes "
                f"{wanted} precomputed ones; detect with --keep_features, or set --model.regions.features=end_to_end"
            )
        return batch.features.to(self.embedding.words.weight.dtype)


def _without_task(x: Tensor, axis: int) -> Tensor:
    """x without the task's token, which stands behind [CLS]."""
    return torch.cat([x.narrow(axis, 0, 1), x.narrow(axis, 2, x.shape[axis] - 2)], dim=axis)


def _without_task_of(one: AttentionMap) -> AttentionMap:
    weights = one.weights if one.queries == "regions" else _without_task(one.weights, 2)
    return replace(one, weights=weights if one.keys == "regions" else _without_task(weights, 3))
