"""All that makes VL-BERT VL-BERT: what the encoder reads at each word, region and at [END] (paper 3.2, figure 1)."""

import torch
from torch import Tensor, nn

from vlbert.batch import Batch
from vlbert.boxes import geometry_embedding
from vlbert.config import ModelConfig

REGION_SEGMENT = 2  # segment C; A and B are 0 and 1
LAYER_NORM_EPS = 1e-12


class VisualLinguisticEmbedding(nn.Module):
    """Token + visual feature + segment + position embedding, then LayerNorm and dropout.

    Every word also carries the look of a region: of the whole image, unless the task ties it to another. Rows without
    a picture carry one learned look instead. All regions share one position, the first after the text; [END] follows.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, appearance_channels: int):
        super().__init__()
        self.config = config
        hidden = config.hidden
        self.words = nn.Embedding(vocab_size, hidden)
        self.positions = nn.Embedding(config.max_positions, hidden)
        self.segments = nn.Embedding(3, hidden)
        self.region_token = nn.Embedding(1, hidden)  # [IMG]
        self.hidden_region_token = nn.Embedding(1, hidden)  # [IMG] of a masked region
        self.end_token = nn.Embedding(1, hidden)  # [END]
        self.look_without_picture = nn.Embedding(1, hidden)
        self.visual = nn.Linear(config.geometry_channels + appearance_channels, hidden)
        self.visual_norm_words = nn.LayerNorm(hidden, eps=LAYER_NORM_EPS)
        self.visual_norm_regions = nn.LayerNorm(hidden, eps=LAYER_NORM_EPS)
        self.norm = nn.LayerNorm(hidden, eps=LAYER_NORM_EPS)
        self.dropout = nn.Dropout(config.dropout)

    def initialise(self) -> None:
        """After the general initialisation: the gains that decide how loudly the picture speaks at first."""
        self.visual.reset_parameters()  # as the authors: PyTorch's own rule, not N(0, initializer_range)
        nn.init.constant_(self.visual_norm_words.weight, self.config.visual_gain_words)
        nn.init.constant_(self.visual_norm_regions.weight, self.config.visual_gain_regions)

    def forward(self, batch: Batch, appearance: Tensor) -> tuple[Tensor, Tensor]:
        """appearance [K, D] of the real regions -> embeddings [N, T + R + 1, C] and their mask, bool [N, T + R + 1].

        The order is text, regions, [END]; padding lies in between, and positions do not count it.
        """
        looks = self.region_looks(batch, appearance)  # (N, R, C)
        length = batch.text_mask.sum(dim=1, keepdim=True)  # (N, 1)

        has_picture = batch.region_mask.any(dim=1)[:, None, None]
        word_looks = self.look_without_picture.weight[0].expand(*batch.tokens.shape, -1)
        if looks.shape[1]:
            seen = looks.gather(1, batch.looks_at[:, :, None].expand(-1, -1, looks.shape[2]))  # (N, T, C)
            word_looks = torch.where(has_picture, seen, word_looks.to(seen.dtype))
        words = (
            self.words(batch.tokens)
            + self.visual_norm_words(word_looks)
            + self.segments(batch.segments)
            + self.positions(torch.arange(batch.tokens.shape[1], device=length.device))
        )
        at_regions = self.positions(length) + self.segments.weight[REGION_SEGMENT]  # (N, 1, C)
        token = torch.where(
            batch.region_hidden[:, :, None], self.hidden_region_token.weight[0], self.region_token.weight[0]
        )
        regions = token + self.visual_norm_regions(looks) + at_regions
        end = self.end_token.weight[0] + self.positions(length + 1) + self.segments.weight[REGION_SEGMENT]  # (N, 1, C)

        embedded = torch.cat([words, regions, end], dim=1)
        mask = torch.cat([batch.text_mask, batch.region_mask, torch.ones_like(length, dtype=torch.bool)], dim=1)
        return self.dropout(self.norm(embedded)), mask

    def region_looks(self, batch: Batch, appearance: Tensor) -> Tensor:
        """The visual feature of every region, geometry beside appearance: [N, R, C], zero where there is no region."""
        looks = appearance.new_zeros(*batch.region_mask.shape, self.config.hidden)
        if not len(appearance):
            return looks
        sizes = torch.zeros(len(batch), 2, dtype=torch.int64, device=appearance.device)
        sizes[batch.picture_rows] = batch.picture_sizes
        rows, _ = batch.region_mask.nonzero(as_tuple=True)
        geometry = geometry_embedding(
            batch.boxes[batch.region_mask],
            sizes[rows],
            self.config.geometry_channels,
            corners=self.config.geometry == "corners",
        )
        features = self.visual(self.dropout(torch.cat([geometry.to(appearance.dtype), appearance], dim=1)))
        if self.config.visual_activation == "relu":
            features = features.relu()
        return looks.to(features.dtype).masked_scatter(batch.region_mask[:, :, None], features)
