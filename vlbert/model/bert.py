"""Start from BERT: copy what VL-BERT shares with it (paper 4.1) from any Hugging Face BERT, a folder or a hub name."""

import pickle
import re
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.model.layers import LAYER_NORM_EPS
from vlbert.model.vlbert import VLBert

if TYPE_CHECKING:
    from transformers import BertConfig

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
    """The vocabulary of a Hugging Face BERT; ValueError where it has none, or tells capitals apart: ours does not."""
    from transformers import AutoTokenizer

    ids: dict[str, int] = {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        ids = tokenizer.get_vocab()
    except ValueError:  # no file to make one of, or only code of theirs
        pass
    except OSError as error:
        raise ValueError(f"{name} is neither the folder of a BERT nor the name of one on the hub: {error}") from error
    if not ids.keys() - set(SPECIALS):  # what transformers gives where there is no vocab.txt
        raise ValueError(f"{name} came without a vocabulary; put the vocab.txt it was trained with beside it")
    capitals = any(re.search("[A-Z]", token) for token in ids if not token.startswith("["))
    if capitals or not getattr(tokenizer, "do_lower_case", True):
        raise ValueError(f"{name} is a cased BERT; captions are lower-cased here, take an uncased one")
    return Vocabulary(sorted(ids, key=ids.get), where=name)


def init_from_bert(vlbert: VLBert, head: nn.Module, name: str, vocabulary: Vocabulary) -> str:
    """Copy embeddings and encoder and, where `head` has them too, the word classifier, pooler and relationship.

    [END], [IMG], segment C, the visual parts and all that BERT has not, or came without, keep their own initialisation.
    Returns what was taken, in words. ValueError where it is no BERT, or one of another shape, or of another vocabulary
    than the run's.
    """
    config, theirs = _read(name)
    _check(vlbert, config, name)
    if bert_vocabulary(name).tokens != vocabulary.tokens:
        raise ValueError(
            f"the run's vocabulary is not that of {name}: every word would get the weights of another; give "
            f"--vocabulary=FILE with {name}'s own vocab.txt, or --bert=None"
        )

    embedding = vlbert.embedding
    _copy(embedding.words.weight[: vlbert.vocab_size], theirs["bert.embeddings.word_embeddings.weight"])
    _copy(embedding.segments.weight[:2], theirs["bert.embeddings.token_type_embeddings.weight"])
    positions = min(vlbert.config.max_positions, config.max_position_embeddings)
    _copy(embedding.positions.weight[:positions], theirs["bert.embeddings.position_embeddings.weight"][:positions])
    _copy_module(embedding.norm, theirs, "bert.embeddings.LayerNorm")
    for number, layer in enumerate(_text_layers(vlbert)):
        for part, their_part in _LAYER.items():
            _copy_module(getattr(layer, part), theirs, f"bert.encoder.layer.{number}.{their_part}")

    taken = ["words and encoder"]
    for words, parts in _head_parts(head, vlbert.vocab_size).items():
        if all(f"{source}.weight" in theirs or source in theirs for _, source in parts):
            for part, source in parts:
                if isinstance(part, nn.Module):
                    _copy_module(part, theirs, source)
                else:
                    _copy(part, theirs[source])
            taken.append(words)
    return f"{', '.join(taken)} from {name}; all else starts from random weights"


def _head_parts(head: nn.Module, vocab_size: int) -> dict[str, list[tuple[nn.Module | Tensor, str]]]:
    """What a head may share with BERT: in words -> (our module or parameter, their name)."""
    parts: dict[str, list[tuple[nn.Module | Tensor, str]]] = {}
    if getattr(head, "word_transform", None) is not None:
        parts["word classifier"] = [
            (head.word_transform.dense, "cls.predictions.transform.dense"),
            (head.word_transform.norm, "cls.predictions.transform.LayerNorm"),
            (head.word_bias[:vocab_size], "cls.predictions.bias"),
        ]
    pooler = getattr(head, "pooler", None)
    if pooler is not None and pooler.kind == "tanh":  # of the others BERT has none
        parts["pooler"] = [(pooler.dense, "bert.pooler.dense")]
        if getattr(head, "relationship", None) is not None:
            parts["relationship"] = [(head.relationship, "cls.seq_relationship")]
    return parts


def _text_layers(vlbert: VLBert) -> list[nn.Module]:
    """The layers that BERT may give: all J, or all T."""
    return [layer for letter, layer in zip(vlbert.config.layers, vlbert.encoder.layers, strict=True) if letter in "JT"]


def _read(name: str) -> tuple["BertConfig", dict[str, Tensor]]:
    """Configuration and tensors of a Hugging Face BERT, named as in BertForPreTraining, without those it lacks."""
    from transformers import AutoConfig, BertForPreTraining

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        if config.model_type != "bert":
            raise ValueError(f"it is a {config.model_type}")
        bert, loading = BertForPreTraining.from_pretrained(name, output_loading_info=True, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"{name} is neither the folder of a BERT nor the name of one on the hub: {reason}") from error
    missing = set(loading["missing_keys"])
    found = {key: tensor for key, tensor in bert.state_dict().items() if key not in missing}
    lacking = sorted(key for key in missing if key.startswith("bert.") and not key.startswith("bert.pooler."))
    if lacking:
        raise ValueError(f"{name} is no whole BERT: it lacks {lacking[0]} and {len(lacking) - 1} more")
    return config, found


def _check(vlbert: VLBert, config: "BertConfig", name: str) -> None:
    """ValueError where the same weights would be another network with us."""
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
    differing = [(field, getattr(config, field, value), value) for field, value in wanted.items()]
    differing = [
        f"{field} {theirs}, the recipe's model has {value}" for field, theirs, value in differing if theirs != value
    ]
    if differing:
        raise ValueError(f"{name} is a BERT of another shape: it has {'; '.join(differing)}")


def _copy(parameter: Tensor, source: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(source)


def _copy_module(module: nn.Module, theirs: dict[str, Tensor], name: str) -> None:
    for kind in ("weight", "bias"):
        _copy(getattr(module, kind), theirs[f"{name}.{kind}"])
