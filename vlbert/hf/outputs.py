"""The output class of the models. Shape letters are those of vlbert/data/batch.py."""

from dataclasses import dataclass

from torch import Tensor
from transformers.utils.generic import ModelOutput


@dataclass
class VLBertOutput(ModelOutput):
    """Outputs of a model. Fields that the model does not compute are None. Values at padding are meaningless.

    B is the number of texts. N is the number of rows: B * choices in VCR, otherwise B.

    Attributes:
        loss: The training loss, a scalar, if there are labels.
        logits: Question answering: [N, answers]. VCR: [B, choices]. Referring expression: [N, R], -inf for regions that
            are not candidates. Retrieval: [N]; the sigmoid is the probability that text and image belong together.
        prediction_logits: Pre-training: [N, T, vocabulary].
        region_logits: Pre-training: [N, R, 1 + classes], over the detector's classes, background first. VCR with
            region_loss="contextual": [N, R, classes].
        relationship_logits: With a relationship head: [N, 2]. Class 0 means that text and image belong together.
        last_hidden_state: Only from VLBertModel: the text's vectors, float [N, T, C].
        visual_last_hidden_state: The regions' vectors, [N, R, C'], whole image first. C' is region_hidden_size or C.
        hidden_states: With output_hidden_states: the text before the first layer and after each layer, [N, T, C].
        visual_hidden_states: The same for the regions, [N, R, C'].
        attentions: With output_attentions: [N, heads, from, to] for each layer. In a joint layer ("J" in
            ModelConfig.layers), both `from` and `to` are the text, the regions and [END]. A co-attention layer ("X")
            has two tensors: from text to regions, and from regions to text.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    prediction_logits: Tensor | None = None
    region_logits: Tensor | None = None
    relationship_logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    visual_last_hidden_state: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    visual_hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
