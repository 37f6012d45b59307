"""The VLBert model. It turns a batch of captions and images into contextual vectors of words and regions."""

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
    """The contextual vectors of a batch. Vectors at padding are zero; the batch has the masks.

    Attributes:
        text: float [N, T, C].
        regions: float [N, R, C'], where C' is region_hidden_size if the config sets it, otherwise C.
        appearance: float [K, D], appearance features of the real regions of all images, in image order.
        attentions: if requested, the attention maps of all layers. VL-BERT's [END] is the last region. The task token
            is left out, so the weights of a query may sum to less than 1.
        hidden_states: if requested, text [N, T, C] and regions [N, R, C'] before the first layer and after each layer.
            Before the first layer, vectors at padding are meaningless.
    """

    text: Tensor
    regions: Tensor
    appearance: Tensor
    attentions: tuple[AttentionMap, ...] | None = None
    hidden_states: tuple[tuple[Tensor, Tensor], ...] | None = None


class VLBert(nn.Module):
    """The model without a head: Fast R-CNN features, input embeddings and the encoder (paper, figure 1).

    Load a trained model with `VLBertModel.from_pretrained(NAME).vlbert` (vlbert.hf).
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
        """Return the contextual vectors of a batch (see vlbert/data/batch.py).

        Raises ValueError if a row is longer than the position table, or if the model needs precomputed features that
        the batch does not have.

        Args:
            attentions: also return the attention maps of all layers.
            appearance: result of the method `appearance` for the same images, if it has already been computed.
            hidden_states: also return text and regions before the first layer and after each layer.
        """
        if batch.tokens.shape[1] > self.config.max_tokens:
            row = batch.sizes.tokens.index(longest := max(batch.sizes.tokens))
            raise ValueError(
                f"sample {batch.keys[batch.sizes.examples[row]]} has a text of {longest} tokens, but the model reads "
                f"at most {self.config.max_tokens}; shorten the text"
            )
        appearance = self.appearance(batch) if appearance is None else appearance
        maps: list[AttentionMap] | None = [] if attentions else None
        embedded = self.embedding(batch, appearance)
        states: list[Streams] | None = [embedded] if hidden_states else None
        encoded = self.encoder(embedded, maps, states)
        if self.config.task_token is not None:
            maps = maps and [_drop_task_from_map(attention) for attention in maps]
        return Encoded(
            *self._text_and_regions(encoded, batch),
            appearance,
            None if maps is None else tuple(maps),
            None if states is None else tuple(self._text_and_regions(streams, batch) for streams in states),
        )

    def _text_and_regions(self, streams: Streams, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the text [N, T, C] and the regions [N, R, C'], without the task token and [END]."""
        text = streams.text if self.config.task_token is None else _drop_task(streams.text, 1)
        return text, streams.regions[:, : batch.region_mask.shape[1]]

    def appearance(self, batch: Batch) -> Tensor:
        """Return the appearance features of all real regions of the batch's images, in image order: [K, D]."""
        if not len(batch.image_rows):
            return self.embedding.words.weight.new_zeros(0, self.config.regions.channels)
        if self.fast_rcnn is not None:
            return self.fast_rcnn(batch)
        expected = (len(batch.real_regions), self.config.regions.channels)
        if tuple(batch.features.shape) != expected:
            raise ValueError(
                f"the batch with sample {batch.keys[0]} has features {tuple(batch.features.shape)}, the model needs "
                f"precomputed ones, {expected}; detect with --keep_features, or set --model.regions.features=end_to_end"
            )
        return batch.features.to(self.embedding.words.weight.dtype)


def _drop_task(x: Tensor, axis: int) -> Tensor:
    """Remove the task token, which follows [CLS], along the given axis."""
    return torch.cat([x.narrow(axis, 0, 1), x.narrow(axis, 2, x.shape[axis] - 2)], dim=axis)


def _drop_task_from_map(attention: AttentionMap) -> AttentionMap:
    weights = attention.weights if attention.queries == "regions" else _drop_task(attention.weights, 2)
    return replace(attention, weights=weights if attention.keys == "regions" else _drop_task(weights, 3))
