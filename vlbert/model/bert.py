"""Initialise VL-BERT from a Hugging Face BERT (paper 4.1), given as a folder or a Hub name."""

import pickle
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.model.layers import LAYER_NORM_EPS
from vlbert.model.vlbert import VLBert

if TYPE_CHECKING:
    from transformers import BertConfig

# Hugging Face's name for each part of a layer -> our name.
BERT_LAYER = {
    "attention.self.query": "query",
    "attention.self.key": "key",
    "attention.self.value": "value",
    "attention.output.dense": "attention_output",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "intermediate",
    "output.dense": "output",
    "output.LayerNorm": "output_norm",
}


def bert_vocabulary(name: str) -> Vocabulary:
    """Return a Hugging Face BERT's vocabulary. Raises ValueError if it is not found, or if the BERT is cased."""
    from transformers import AutoTokenizer

    ids: dict[str, int] = {}
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        ids = tokenizer.get_vocab()
    except ValueError:  # no vocabulary file, or only with remote code
        pass
    except OSError as error:
        raise ValueError(f"{name} is neither the folder of a BERT nor the name of one on the Hub: {error}") from error
    if not ids.keys() - set(SPECIALS):  # transformers returns only these if there is no vocab.txt
        raise ValueError(f"{name} has no vocabulary; put the vocab.txt that it was trained with into its folder")
    if not getattr(tokenizer, "do_lower_case", True):
        raise ValueError(f"{name} is a cased BERT; captions are lower-cased, so use an uncased one")
    return Vocabulary(sorted(ids, key=ids.__getitem__), source=name)


@torch.no_grad()
def init_from_bert(vlbert: VLBert, head: nn.Module, name: str, vocabulary: Vocabulary) -> str:
    """Copy the weights of a BERT to a model and its head. Returns a sentence that lists the copied parts.

    `vlbert` gets BERT's embeddings and encoder. `head` gets the word classifier, the pooler and the relationship
    classifier, if both the head and this BERT have them. All other parts, such as [END], [IMG], segment C and the
    visual layers, keep their initial values. Raises ValueError if `name` is not a BERT, or if its configuration or
    vocabulary does not match the model's.
    """
    config, tensors = _read(name)
    _check_shape(vlbert, config, name)
    if bert_vocabulary(name).tokens != vocabulary.tokens:
        raise ValueError(
            f"the run's vocabulary is not that of {name}, so words would get the weights of other words; set "
            f"--vocabulary=FILE to {name}'s own vocab.txt, or --bert=None"
        )

    embedding = vlbert.embedding
    embedding.words.weight[: vlbert.vocab_size].copy_(tensors["bert.embeddings.word_embeddings.weight"])
    embedding.segments.weight[:2].copy_(tensors["bert.embeddings.token_type_embeddings.weight"])
    positions = min(vlbert.config.max_positions, config.max_position_embeddings)
    embedding.positions.weight[:positions].copy_(tensors["bert.embeddings.position_embeddings.weight"][:positions])
    _copy_module(embedding.norm, tensors, "bert.embeddings.LayerNorm")
    for number, layer in enumerate(_text_layers(vlbert)):
        for bert_part, part in BERT_LAYER.items():
            _copy_module(getattr(layer, part), tensors, f"bert.encoder.layer.{number}.{bert_part}")

    taken = ["words and encoder"]
    for name_of_part, parts in _head_parts(head, vlbert.vocab_size).items():
        if all(f"{source}.weight" in tensors or source in tensors for _, source in parts):
            for part, source in parts:
                if isinstance(part, nn.Module):
                    _copy_module(part, tensors, source)
                else:
                    part.copy_(tensors[source])
            taken.append(name_of_part)
    return f"{', '.join(taken)} from {name}; everything else starts from random weights"


def _head_parts(head: Any, vocab_size: int) -> dict[str, list[tuple[nn.Module | Tensor, str]]]:
    """Return the parts of a head that BERT also has: {description: [(module or parameter, its name in BERT)]}."""
    parts: dict[str, list[tuple[nn.Module | Tensor, str]]] = {}
    if getattr(head, "word_transform", None) is not None:
        parts["word classifier"] = [
            (head.word_transform.dense, "cls.predictions.transform.dense"),
            (head.word_transform.norm, "cls.predictions.transform.LayerNorm"),
            (head.word_bias[:vocab_size], "cls.predictions.bias"),
        ]
    pooler = getattr(head, "pooler", None)
    if pooler is not None and pooler.kind == "tanh":  # BERT has no other pooler
        parts["pooler"] = [(pooler.dense, "bert.pooler.dense")]
        if getattr(head, "relationship", None) is not None:
            parts["relationship"] = [(head.relationship, "cls.seq_relationship")]
    return parts


def _text_layers(vlbert: VLBert) -> list[nn.Module]:
    """Return the layers that are initialised from BERT's layers: those with the letter J or T."""
    return [layer for letter, layer in zip(vlbert.config.layers, vlbert.encoder.layers, strict=True) if letter in "JT"]


def _read(name: str) -> tuple["BertConfig", dict[str, Tensor]]:
    """Return a Hugging Face BERT's configuration and its stored tensors, named as in BertForPreTraining."""
    from transformers import AutoConfig, BertForPreTraining

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        if config.model_type != "bert":
            raise ValueError(f"it is a {config.model_type}")
        loaded: Any = BertForPreTraining.from_pretrained(name, output_loading_info=True, trust_remote_code=False)
        bert, loading = loaded
    except (OSError, ValueError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"{name} is neither the folder of a BERT nor the name of one on the Hub: {reason}") from error
    missing = set(loading["missing_keys"])
    tensors = {key: tensor for key, tensor in bert.state_dict().items() if key not in missing}
    absent = sorted(key for key in missing if key.startswith("bert.") and not key.startswith("bert.pooler."))
    if absent:
        raise ValueError(f"{name} is not a complete BERT: it lacks {absent[0]} and {len(absent) - 1} more")
    return config, tensors


def _check_shape(vlbert: VLBert, config: "BertConfig", name: str) -> None:
    """Raise ValueError if BERT's sizes, activation, position type or LayerNorm epsilon differ from the model's."""
    ours = vlbert.config
    wanted = {
        "hidden_size": ours.hidden_size,
        "num_hidden_layers": len(_text_layers(vlbert)),
        "num_attention_heads": ours.num_heads,
        "intermediate_size": ours.intermediate_size,
        "vocab_size": vlbert.vocab_size,
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "layer_norm_eps": LAYER_NORM_EPS,
    }
    differing = [(field, getattr(config, field, want), want) for field, want in wanted.items()]
    differing = [f"{field} {got}, the recipe's model has {want}" for field, got, want in differing if got != want]
    if differing:
        raise ValueError(f"{name} is a BERT of another shape: it has {'; '.join(differing)}")


def _copy_module(module: nn.Module, tensors: dict[str, Tensor], name: str) -> None:
    module.load_state_dict({kind: tensors[f"{name}.{kind}"] for kind in ("weight", "bias")})
