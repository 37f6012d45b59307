"""The encoder's input embeddings: one vector for each token, for each region and, in VL-BERT, for [END].

VL-BERT uses `VisualLinguisticEmbedding` (paper 3.2, figure 1). ViLBERT and Unicoder-VL use `SeparateEmbedding`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlbert.config import TASK_TOKENS, ModelConfig
from vlbert.data.batch import Batch
from vlbert.data.boxes import box_location, geometry_embedding
from vlbert.model.layers import LAYER_NORM_EPS, Streams

REGION_SEGMENT = 2  # segment C; A and B are 0 and 1


class VisualLinguisticEmbedding(nn.Module):
    """The sum of token, visual feature, segment and position embeddings, followed by LayerNorm and dropout.

    A word gets the visual feature embedding of the whole image, unless the task assigns another region to it
    (TextInput.token_region). In rows without an image, it gets a learned vector instead. All regions of a row share the
    first position after the text. [END] has the next position.

    Shape letters are those of vlbert/data/batch.py. L is the width of a visual feature embedding.
    """

    def __init__(self, config: ModelConfig, vocab_size: int):
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        hidden_size, visual_size = config.hidden_size, config.visual_embedding_size or config.hidden_size
        self.words = nn.Embedding(config.word_rows(vocab_size), hidden_size)
        self.positions = nn.Embedding(config.max_positions, hidden_size)
        self.segments = nn.Embedding(3, hidden_size)
        if config.special_tokens == "own":
            self.region_token = nn.Embedding(config.region_classes or 1, hidden_size)  # [IMG]
            self.end_token = nn.Embedding(1, hidden_size)  # [END]
        if config.masked_region_token:
            self.masked_region_token = nn.Embedding(1, hidden_size)  # replaces [IMG] at a masked region
        if config.regions.masks_features:
            self.masked_appearance = nn.Embedding(1, config.regions.channels)
        self.no_image_embedding = nn.Embedding(1, visual_size)
        self.visual = nn.Linear(config.geometry_channels + config.regions.channels, visual_size)
        self.text_visual = VisualProjection(config, visual_size, config.visual_gain_words)
        self.region_visual = VisualProjection(config, visual_size, config.visual_gain_regions)
        self.norm = nn.LayerNorm(hidden_size, eps=LAYER_NORM_EPS)
        self.dropout = nn.Dropout(config.dropout)
        self.visual_dropout = nn.Dropout(config.dropout if config.visual_dropout else 0.0)

    def initialise(self) -> None:
        """Set the parameters whose initial values differ from BERT's. Call `heads.initialise` first."""
        if self.config.visual_initialisation == "pytorch":
            self.visual.reset_parameters()
        if self.config.regions.masks_features:
            nn.init.zeros_(self.masked_appearance.weight)
        self.text_visual.initialise()
        self.region_visual.initialise()

    def forward(self, batch: Batch, appearance: Tensor) -> Streams:
        """Return the embedded text [N, T, C] and regions [N, R + 1, C], with [END] after the regions.

        `appearance` [K, D] has the appearance features of the real regions of all images, in image order.
        """
        visual = self.region_visual_embeddings(batch, appearance)  # (N, R, L)
        length = batch.text_mask.sum(dim=1, keepdim=True)  # (N, 1)
        region_token, end_token = self._special_tokens(batch)

        has_image = batch.region_mask.any(dim=1)[:, None, None]
        word_visual = self.no_image_embedding.weight[0].expand(*batch.tokens.shape, -1)
        end_visual = self.no_image_embedding.weight[0].expand(len(batch), 1, -1)
        if visual.shape[1]:
            named = visual.gather(1, batch.token_region[:, :, None].expand(-1, -1, visual.shape[2]))  # (N, T, L)
            word_visual = torch.where(has_image, named, word_visual.to(visual.dtype))
            end_visual = torch.where(has_image, visual[:, :1], end_visual.to(visual.dtype))  # the whole image's
        text = (
            self.words(batch.tokens)
            + self.text_visual(word_visual)
            + self.segments(batch.segments)
            + self.positions(torch.arange(batch.tokens.shape[1], device=length.device))
        )
        at_region = self.positions(length) + self.segments.weight[REGION_SEGMENT]  # (N, 1, C)
        regions = region_token + self.region_visual(visual) + at_region
        end = end_token + self.positions(length + 1) + self.segments.weight[REGION_SEGMENT]  # (N, 1, C)
        if self.config.end_visual_embedding:
            end = end + self.text_visual(end_visual)

        # One dropout for both streams, because results of earlier runs depend on the order of random numbers.
        both = self.dropout(self.norm(torch.cat([text, regions, end], dim=1)))
        text, regions = both.split([text.shape[1], regions.shape[1] + 1], dim=1)
        region_mask, lengths = F.pad(batch.region_mask, (0, 1), value=True), [n + 1 for n in batch.sizes.regions]
        return Streams(text, regions, batch.text_mask, region_mask, batch.sizes.tokens, lengths)

    def _special_tokens(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the token embeddings of the regions ([N, R, C]) and of [END] ([C])."""
        if self.config.special_tokens == "vocabulary":
            region, end = self.words.weight[self.vocab_size :]
            return region.expand(*batch.region_mask.shape, -1), end
        region = self.region_token(batch.region_classes if self.config.region_classes else batch.region_classes * 0)
        if self.config.masked_region_token:
            region = torch.where(batch.region_masked[:, :, None], self.masked_region_token.weight[0], region)
        return region, self.end_token.weight[0]

    def region_visual_embeddings(self, batch: Batch, appearance: Tensor) -> Tensor:
        """Return the visual feature embedding of each region: [N, R, L], zero in the padding.

        A fully connected layer computes it from the concatenated geometry embedding and appearance feature (paper 3.2).
        """
        if not len(appearance):
            return appearance.new_zeros(*batch.region_mask.shape, self.visual.out_features)
        images, _ = batch.image_and_number()  # (K,)
        if self.config.regions.masks_features:
            appearance = replace_masked(appearance, batch, self.masked_appearance.weight[0])
        geometry = geometry_embedding(
            batch.of_real_regions(batch.boxes),
            batch.image_sizes[images],
            self.config.geometry_channels,
            corners=self.config.geometry == "corners",
        )
        features = self.visual(self.visual_dropout(torch.cat([geometry.to(appearance.dtype), appearance], dim=1)))
        if self.config.visual_activation == "relu":
            features = features.relu()
        return features_by_row(features, batch)


def replace_masked(appearance: Tensor, batch: Batch, vector: Tensor) -> Tensor:
    """Return the appearance features [K, D] with those of masked regions replaced by `vector` [D]."""
    masked = batch.of_real_regions(batch.region_masked)  # (K,)
    return torch.where(masked[:, None], vector.to(appearance.dtype), appearance)


def features_by_row(features: Tensor, batch: Batch) -> Tensor:
    """Arrange the values of all real regions by row of the batch: [K, ...] -> [N, R, ...], zero in the padding."""
    # An extra last image without regions, at index -1, serves rows without an image.
    by_image = _features_by_image(features, batch, len(batch.image_rows) + 1)
    return by_image.index_select(0, batch.image_of % len(by_image))


def _features_by_image(features: Tensor, batch: Batch, images: int) -> Tensor:
    """Arrange the values of real regions by image: [K, ...] -> [images, R, ...], zero where there is no region."""
    width, shape = batch.region_mask.shape[1], features.shape[1:]
    padded = features.new_zeros(images * width, *shape).index_copy(0, batch.real_regions, features)
    return padded.view(images, width, *shape)


class VisualProjection(nn.Module):
    """A projection of visual feature embeddings to the text's width: [..., L] -> [..., C].

    There is no linear layer if L = C. If config.visual_norm is "layer_norm", LayerNorm follows, with `gain` as its
    initial weight.
    """

    def __init__(self, config: ModelConfig, channels: int, gain: float):
        super().__init__()
        self.gain = gain
        self.to_hidden = nn.Linear(channels, config.hidden_size) if channels != config.hidden_size else None
        self.norm = nn.LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS) if config.visual_norm == "layer_norm" else None

    def initialise(self) -> None:
        if self.norm is not None:
            nn.init.constant_(self.norm.weight, self.gain)

    def forward(self, visual: Tensor) -> Tensor:
        if self.to_hidden is not None:
            visual = self.to_hidden(visual)
        return visual if self.norm is None else self.norm(visual)


class SeparateEmbedding(nn.Module):
    """Separate embeddings of text and regions, as in ViLBERT (2.1) and Unicoder-VL (3.1).

    A token's vector is the sum of its word, position and segment embeddings. A region's vector is the sum of two linear
    projections: of its appearance feature and of its location (five numbers). Each sum has its own LayerNorm.
    """

    whole_image_location: Tensor

    def __init__(self, config: ModelConfig, vocab_size: int):
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        hidden_size, region_size = config.hidden_size, config.regions_stream.hidden_size
        self.words = nn.Embedding(config.word_rows(vocab_size), hidden_size)
        self.positions = nn.Embedding(config.max_positions, hidden_size)
        self.segments = nn.Embedding(2, hidden_size)
        self.tasks = nn.Embedding(TASK_TOKENS, hidden_size) if config.task_token is not None else None
        self.norm = nn.LayerNorm(hidden_size, eps=LAYER_NORM_EPS)
        self.visual = nn.Linear(config.regions.channels, region_size)
        self.location = nn.Linear(5, region_size)
        self.region_segments = nn.Embedding(2, region_size) if config.region_segment else None
        self.region_norm = nn.LayerNorm(region_size, eps=LAYER_NORM_EPS)
        self.dropout = nn.Dropout(config.dropout)
        self.register_buffer("whole_image_location", torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0]), persistent=False)
        if config.regions.masks_features and config.regions.masked_features == "learned":
            self.masked_appearance = nn.Embedding(1, config.regions.channels)

    def initialise(self) -> None:
        """Set the parameters whose initial values differ from BERT's. Call `heads.initialise` first."""
        if hasattr(self, "masked_appearance"):
            nn.init.zeros_(self.masked_appearance.weight)

    def forward(self, batch: Batch, appearance: Tensor) -> Streams:
        """Return the embedded text [N, T, C] and regions [N, R, C'].

        With a task token, the text is [N, T + 1, C]. `appearance` [K, D] has the appearance features of the real
        regions of all images, in image order.
        """
        regions = features_by_row(self._regions(batch, appearance), batch)
        text, text_mask = self.words(batch.tokens) + self.segments(batch.segments), batch.text_mask
        text_lengths, region_lengths = batch.sizes.tokens, batch.sizes.regions
        text = text + self.positions(torch.arange(batch.tokens.shape[1], device=text.device))
        if self.config.mentioned_regions and regions.shape[1]:  # (Unicoder-VL, 4.2)
            mentioned = batch.token_region[:, :, None]
            text = text + regions.gather(1, mentioned.expand(-1, -1, text.shape[2])) * (mentioned > 0)
        if self.tasks is not None:  # after [CLS]; it has no position, and the others keep theirs
            task = self.tasks.weight[self.config.task_token].expand(len(batch), 1, -1)
            text = torch.cat([text[:, :1], task, text[:, 1:]], dim=1)
            text_mask, text_lengths = F.pad(text_mask, (1, 0), value=True), [n + 1 for n in text_lengths]
        region_mask = batch.region_mask
        if self.config.whole_image == "none":
            region_mask = region_mask & (torch.arange(region_mask.shape[1], device=region_mask.device) > 0)
            region_lengths = [max(0, n - 1) for n in region_lengths]
        regions = self.dropout(self.region_norm(regions))
        return Streams(self.dropout(self.norm(text)), regions, text_mask, region_mask, text_lengths, region_lengths)

    def _regions(self, batch: Batch, appearance: Tensor) -> Tensor:
        """Return the embeddings of the real regions of all images, before LayerNorm: [K, C']."""
        if not len(appearance):
            return appearance.new_zeros(0, self.visual.out_features)
        images, numbers = batch.image_and_number()  # (K,)
        whole_image = (numbers == 0)[:, None]
        if self.config.regions.masks_features:
            learned = self.config.regions.masked_features == "learned"
            vector = self.masked_appearance.weight[0] if learned else appearance.new_zeros(appearance.shape[1])
            appearance = replace_masked(appearance, batch, vector)
        if self.config.whole_image == "mean":
            regions = appearance.float().masked_fill(whole_image, 0.0)
            mean = _features_by_image(regions, batch, len(batch.image_rows)).sum(dim=1) / batch.averaged_over[:, None]
            appearance = torch.where(whole_image, mean[images].to(appearance.dtype), appearance)
        location = box_location(batch.of_real_regions(batch.boxes), batch.image_sizes[images])
        location = torch.where(whole_image, self.whole_image_location.to(location.dtype), location)
        regions = self.visual(appearance) + self.location(location)
        return regions if self.region_segments is None else regions + self.region_segments.weight[1]
