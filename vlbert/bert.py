"""Start from BERT: copy what VL-BERT shares with it (paper 4.1) from any Hugging Face BERT, a folder or a hub name."""

import torch
from torch import nn

from vlbert.model import VLBert
from vlbert.text import Vocabulary

# Our name of each part of a layer -> Hugging Face's.
_LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
}


def bert_vocabulary(name: str) -> Vocabulary:
    """The vocabulary of a Hugging Face BERT; ValueError where it tells capitals apart, which ours does not."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    if not getattr(tokenizer, "do_lower_case", True):
        raise ValueError(f"{name} is a cased BERT; captions are lower-cased here, take an uncased one")
    ids = tokenizer.get_vocab()
    return Vocabulary(sorted(ids, key=ids.get), where=name)


def start_from_bert(vlbert: VLBert, head: nn.Module, name: str, vocabulary: Vocabulary) -> None:
    """Copy embeddings, encoder and, where `head` predicts words, the masked language model's head.

    [END], [IMG], segment C, the visual parts and everything the task adds keep their own initialisation.
    ValueError where the BERT is of another shape, or of another vocabulary than the run's.
    """
    from transformers import AutoModelForMaskedLM

    if bert_vocabulary(name).pieces != vocabulary.pieces:
        raise ValueError(
            f"the run's vocabulary is not that of {name}: every word would get the weights of another; give "
            f"vocabulary=FILE with {name}'s own vocab.txt, or bert=none"
        )
    bert = AutoModelForMaskedLM.from_pretrained(name)
    theirs = bert.state_dict()
    prefix = "bert."
    config = bert.config
    ours = (vlbert.config.hidden, len(vlbert.encoder.layers), vlbert.config.intermediate, vlbert.vocab_size)
    if ours != (config.hidden_size, config.num_hidden_layers, config.intermediate_size, config.vocab_size):
        raise ValueError(
            f"{name} has hidden {config.hidden_size}, layers {config.num_hidden_layers}, intermediate "
            f"{config.intermediate_size}, vocabulary {config.vocab_size}; the recipe's model has {ours}"
        )

    def copy(parameter: torch.Tensor, source: str) -> None:
        with torch.no_grad():
            parameter.copy_(theirs[source])

    embedding = vlbert.embedding
    copy(embedding.words.weight[: vlbert.vocab_size], f"{prefix}embeddings.word_embeddings.weight")
    copy(embedding.segments.weight[:2], f"{prefix}embeddings.token_type_embeddings.weight")
    positions = min(vlbert.config.max_positions, config.max_position_embeddings)
    with torch.no_grad():
        table = theirs[f"{prefix}embeddings.position_embeddings.weight"]
        embedding.positions.weight[:positions].copy_(table[:positions])
    for kind in ("weight", "bias"):
        copy(getattr(embedding.norm, kind), f"{prefix}embeddings.LayerNorm.{kind}")
        for number, layer in enumerate(vlbert.encoder.layers):
            for part, their_part in _LAYER.items():
                copy(getattr(getattr(layer, part), kind), f"{prefix}encoder.layer.{number}.{their_part}.{kind}")
        if hasattr(head, "word_transform"):
            copy(getattr(head.word_transform.dense, kind), f"cls.predictions.transform.dense.{kind}")
            copy(getattr(head.word_transform.norm, kind), f"cls.predictions.transform.LayerNorm.{kind}")
    if hasattr(head, "word_bias"):
        copy(head.word_bias[: vlbert.vocab_size], "cls.predictions.bias")
