"""All that makes VL-BERT VL-BERT: what the encoder reads at each word, region and at [END] (paper 3.2, figure 1)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlbert.config import ModelConfig
from vlbert.data.batch import Batch
from vlbert.data.boxes import geometry_embedding

REGION_SEGMENT = 2  # segment C; A and B are 0 and 1
LAYER_NORM_EPS = 1e-12


class VisualLinguisticEmbedding(nn.Module):
    """Token + visual feature (its look) + segment + position embedding, then LayerNorm and dropout.

    Every word also carries the look of a region: of the whole image, unless the task ties it to another. Rows without
    a picture carry one learned look instead. All regions share one position, the first after the text; [END] follows.
    """

    def __init__(self, config: ModelConfig, vocab_size: int):
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        hidden_size, looks = config.hidden_size, config.visual_embedding_size or config.hidden_size
        self.words = nn.Embedding(config.word_rows(vocab_size), hidden_size)
        self.positions = nn.Embedding(config.max_positions, hidden_size)
        self.segments = nn.Embedding(3, hidden_size)
        if config.special_tokens == "own":
            self.region_token = nn.Embedding(config.region_classes or 1, hidden_size)  # [IMG]
            self.end_token = nn.Embedding(1, hidden_size)  # [END]
        if config.masked_region_token:
            self.masked_region_token = nn.Embedding(1, hidden_size)  # [IMG] of a masked region
        if config.regions.masks_features:
            self.masked_appearance = nn.Embedding(1, config.regions.channels)
        self.no_image_embedding = nn.Embedding(1, looks)
        self.visual = nn.Linear(config.geometry_channels + config.regions.channels, looks)
        self.text_visual = VisualProjection(config, looks, config.visual_gain_words)
        self.region_visual = VisualProjection(config, looks, config.visual_gain_regions)
        self.norm = nn.LayerNorm(hidden_size, eps=LAYER_NORM_EPS)
        self.dropout = nn.Dropout(config.dropout)
        self.visual_dropout = nn.Dropout(config.dropout if config.visual_dropout else 0.0)

    def initialise(self) -> None:
        """After the general initialisation: the gains that decide how loudly the picture speaks at first."""
        if self.config.visual_initialisation == "pytorch":
            self.visual.reset_parameters()
        if self.config.regions.masks_features:
            nn.init.zeros_(self.masked_appearance.weight)
        self.text_visual.initialise()
        self.region_visual.initialise()

    def forward(self, batch: Batch, appearance: Tensor) -> tuple[Tensor, Tensor]:
        """appearance [K, D] of the pictures' regions -> embeddings [N, T + R + 1, C] and mask, bool [N, T + R + 1].

        The order is text, regions, [END]; padding lies in between, and positions do not count it.
        """
        looks = self.region_visual_embeddings(batch, appearance)  # (N, R, L)
        length = batch.text_mask.sum(dim=1, keepdim=True)  # (N, 1)
        region_token, end_token = self._special_tokens(batch)

        has_picture = batch.region_mask.any(dim=1)[:, None, None]
        word_looks = self.no_image_embedding.weight[0].expand(*batch.tokens.shape, -1)
        end_looks = self.no_image_embedding.weight[0].expand(len(batch), 1, -1)
        if looks.shape[1]:
            seen = looks.gather(1, batch.token_region[:, :, None].expand(-1, -1, looks.shape[2]))  # (N, T, L)
            word_looks = torch.where(has_picture, seen, word_looks.to(seen.dtype))
            end_looks = torch.where(has_picture, looks[:, :1], end_looks.to(looks.dtype))  # of the whole image
        words = (
            self.words(batch.tokens)
            + self.text_visual(word_looks)
            + self.segments(batch.segments)
            + self.positions(torch.arange(batch.tokens.shape[1], device=length.device))
        )
        at_regions = self.positions(length) + self.segments.weight[REGION_SEGMENT]  # (N, 1, C)
        regions = region_token + self.region_visual(looks) + at_regions
        end = end_token + self.positions(length + 1) + self.segments.weight[REGION_SEGMENT]  # (N, 1, C)
        if self.config.end_visual_embedding:
            end = end + self.text_visual(end_looks)

        embedded = torch.cat([words, regions, end], dim=1)
        mask = torch.cat([batch.text_mask, batch.region_mask, torch.ones_like(length, dtype=torch.bool)], dim=1)
        return self.dropout(self.norm(embedded)), mask

    def _special_tokens(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The tokens of regions, [N, R, C], and of [END], [C]."""
        if self.config.special_tokens == "vocabulary":
            image, end = self.words.weight[self.vocab_size :]
            return image.expand(*batch.region_mask.shape, -1), end
        image = self.region_token(batch.region_classes if self.config.region_classes else batch.region_classes * 0)
        if self.config.masked_region_token:
            image = torch.where(batch.region_masked[:, :, None], self.masked_region_token.weight[0], image)
        return image, self.end_token.weight[0]

    def region_visual_embeddings(self, batch: Batch, appearance: Tensor) -> Tensor:
        """The visual feature of every region, geometry beside appearance: [N, R, L], zero where there is no region."""
        mask = batch.region_mask[batch.image_rows]  # (P, R)
        if not len(appearance):
            return appearance.new_zeros(*batch.region_mask.shape, self.visual.out_features)
        pictures, _ = mask.nonzero(as_tuple=True)  # (K,)
        if self.config.regions.masks_features:
            masked = batch.region_masked[batch.image_rows][mask][:, None]
            appearance = torch.where(masked, self.masked_appearance.weight[0].to(appearance.dtype), appearance)
        geometry = geometry_embedding(
            batch.boxes[batch.image_rows][mask],
            batch.image_sizes[pictures],
            self.config.geometry_channels,
            corners=self.config.geometry == "corners",
        )
        features = self.visual(self.visual_dropout(torch.cat([geometry.to(appearance.dtype), appearance], dim=1)))
        if self.config.visual_activation == "relu":
            features = features.relu()
        # One more picture, without regions, for the rows that have none: -1 finds it at the end.
        looks = features.new_zeros(len(mask) + 1, mask.shape[1], features.shape[1])
        looks = looks.masked_scatter(F.pad(mask, (0, 0, 0, 1))[:, :, None], features)
        return looks.index_select(0, batch.image_of % len(looks))


class VisualProjection(nn.Module):
    """What becomes of a look [..., L] before it is added to a token [..., C]: C channels, and a learned gain."""

    def __init__(self, config: ModelConfig, channels: int, gain: float):
        super().__init__()
        self.gain = gain
        self.to_hidden = nn.Linear(channels, config.hidden_size) if channels != config.hidden_size else None
        self.norm = nn.LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS) if config.visual_norm == "layer_norm" else None
        self.scale = nn.Parameter(torch.empty(())) if config.visual_norm == "scale" else None

    def initialise(self) -> None:
        for gain in (self.norm.weight if self.norm else None, self.scale):
            if gain is not None:
                nn.init.constant_(gain, self.gain)

    def forward(self, look: Tensor) -> Tensor:
        if self.to_hidden is not None:
            look = self.to_hidden(look)
        if self.scale is not None:
            return look * self.scale
        return look if self.norm is None else self.norm(look)
