"""What the models return, as transformers' ModelOutput. Shape letters: vlbert/data/batch.py."""

from dataclasses import dataclass

from torch import Tensor
from transformers.utils.generic import ModelOutput


@dataclass
class VLBertOutput(ModelOutput):
    """What a model has of these; the vectors of padding mean nothing.

    loss                      with labels: what training minimises, a float
    logits                    question answering: [N, answers]; VCR: [N, choices]; a referring expression: [N, R], -inf
                              where a region is no candidate; retrieval: [N], whose sigmoid is the probability that text
                              and image belong together
    prediction_logits         pre-training: [N, T, V]  of the words of the vocabulary
    region_logits             [N, R, 1 + classes]  of the detector's classes, background first; VCR: [N * choices, R,
                              classes], where the task predicts them from the encoder's output
    relationship_logits       [N, 2]  whether text and image belong together, where the model has that head
    last_hidden_state         VLBertModel: float [N, T, C]
    visual_last_hidden_state  float [N, R, C']  regions, the whole image first; C' is C unless the model says otherwise
    hidden_states             with output_hidden_states: the text before the first layer and after each, [N, T, C]; of
                              choices, here and below, a row for each: [N * choices, ...]
    visual_hidden_states      the same of the regions, [N, R, C']
    attentions                with output_attentions: a map of each layer, two of a layer X, from the text to the
                              regions and back: [N, heads, from, to]. Layers J are of the text, the regions and [END]
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
