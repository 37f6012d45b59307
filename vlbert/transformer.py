"""BERT's encoder: post-norm layers of multi-head attention and feed-forward (paper 3.1, equations 1 to 4)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlbert.config import ModelConfig
from vlbert.embedding import LAYER_NORM_EPS


class JointLayer(nn.Module):
    """Letter J: every element attends to every real element, words and regions alike."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.hidden, config.hidden)
        self.key = nn.Linear(config.hidden, config.hidden)
        self.value = nn.Linear(config.hidden, config.hidden)
        self.attention_output = nn.Linear(config.hidden, config.hidden)
        self.attention_norm = nn.LayerNorm(config.hidden, eps=LAYER_NORM_EPS)
        self.intermediate = nn.Linear(config.hidden, config.intermediate)
        self.output = nn.Linear(config.intermediate, config.hidden)
        self.output_norm = nn.LayerNorm(config.hidden, eps=LAYER_NORM_EPS)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor, attentions: list[Tensor] | None = None) -> Tensor:
        """x [N, S, C], mask bool [N, S] of the elements that are real -> [N, S, C].

        Where a list is given, how much each element attends to each is added to it: [N, heads, S, S], rows sum to 1.
        """
        n, s, c = x.shape

        def split(projected: Tensor) -> Tensor:
            return projected.view(n, s, self.heads, c // self.heads).transpose(1, 2)  # (N, heads, S, C/heads)

        query, key, value, to = split(self.query(x)), split(self.key(x)), split(self.value(x)), mask[:, None, None, :]
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=to, dropout_p=self.dropout.p if self.training else 0.0
        )
        if attentions is not None:
            scores = query @ key.transpose(2, 3) / query.shape[3] ** 0.5
            attentions.append(scores.masked_fill(~to, -torch.inf).softmax(dim=3))
        attended = attended.transpose(1, 2).reshape(n, s, c)
        x = self.attention_norm(x + self.dropout(self.attention_output(attended)))
        return self.output_norm(x + self.dropout(self.output(F.gelu(self.intermediate(x)))))


LAYERS = {"J": JointLayer}  # letters of ModelConfig.layers


class Encoder(nn.Module):
    """The layers that `ModelConfig.layers` spells."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.layers = nn.ModuleList(LAYERS[letter](config) for letter in config.layers)

    def forward(self, x: Tensor, mask: Tensor, attentions: list[Tensor] | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask, attentions)
        return x
