"""Starting from a Hugging Face BERT: the same network for text alone, whatever heads it came with, or a clear error."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import LETTERS, TINY_MODEL, VILBERT
from torch import nn
from transformers import BertConfig, BertForPreTraining, BertModel, BertTokenizer, GPT2Config, PreTrainedModel

from vlbert.config import ModelConfig
from vlbert.data.batch import Example, TextInput, collate
from vlbert.data.vocabulary import Vocabulary
from vlbert.model.bert import bert_vocabulary, init_from_bert
from vlbert.model.vlbert import VLBert
from vlbert.tasks.pretraining import PretrainingHead, PretrainingSettings

# The image's term is silent at words, as it is when training begins.
SILENT = dataclasses.replace(TINY_MODEL, visual_gain_words=0.0, dropout=0.0)
BERT = BertConfig(
    vocab_size=len(LETTERS),
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=64,
    initializer_range=0.1,
)


def saved(folder: Path, kind: type[PreTrainedModel], config: BertConfig = BERT, words: bool = True) -> PreTrainedModel:
    """A random BERT of that kind, saved in `folder` with the letters as its vocabulary."""
    torch.manual_seed(3)
    bert = kind(config).eval()
    with torch.no_grad():
        for parameter in bert.parameters():  # biases and norms too, which transformers leaves at 0 and 1
            parameter += 0.1 * torch.randn_like(parameter)
    bert.save_pretrained(folder)
    if words:
        (folder / "letters.txt").write_text(LETTERS.text())
        BertTokenizer(str(folder / "letters.txt")).save_pretrained(folder)
    return bert


def ours(config: ModelConfig = SILENT, relationship: bool = False) -> tuple[VLBert, nn.Module]:
    torch.manual_seed(0)
    vlbert, settings = VLBert(config, len(LETTERS)).eval(), PretrainingSettings(relationship=relationship)
    return vlbert, PretrainingHead(config, settings, len(LETTERS), 8).eval()


@pytest.mark.parametrize("config", [SILENT, dataclasses.replace(VILBERT, layers="TVT")], ids=["vlbert", "vilbert"])
@torch.no_grad()
def test_on_text_alone_the_model_equals_bert(tmp_path, config):
    """Without [END], which BERT has not. ViLBERT's layers T do; its pooler and its pair head are not BERT's."""
    theirs, single = saved(tmp_path, BertForPreTraining), config is SILENT
    vlbert, head = ours(config, relationship=True)
    before = {name: tensor.clone() for name, tensor in head.pooler.state_dict().items()}
    reported = init_from_bert(vlbert, head, str(tmp_path), LETTERS)
    parts = "words and encoder, word classifier" + ", pooler, relationship" * single
    assert reported.startswith(f"{parts} from {tmp_path};")
    tokens = LETTERS.encode("some words of text that bert reads")
    segments = (np.arange(len(tokens)) > 9).astype(np.int64)  # two sentences
    batch = collate([Example("a", TextInput(tokens, segments, np.zeros_like(tokens)))])
    embedded = vlbert.embedding(batch, vlbert.appearance(batch))
    if single:
        embedded.region_mask[:, -1] = False
        embedded = dataclasses.replace(embedded, region_lengths=[n - 1 for n in embedded.region_lengths])
    text = vlbert.encoder(embedded).text
    expected = theirs(batch.tokens, token_type_ids=batch.segments, output_hidden_states=True)
    assert float((text - expected.hidden_states[-1]).abs().max()) < 1e-5
    assert float((head.words(vlbert, text[0]) - expected.prediction_logits[0]).abs().max()) < 1e-5
    if single:
        related = head.relationship(head.pooler(text, text))
        assert float((related - expected.seq_relationship_logits).abs().max()) < 1e-5
    else:
        assert all(torch.equal(tensor, before[name]) for name, tensor in head.pooler.state_dict().items())


@torch.no_grad()
def test_what_bert_lacks_keeps_its_initialisation(tmp_path):
    short = BertConfig(**BERT.to_dict() | {"max_position_embeddings": 40, "type_vocab_size": 1})
    theirs = saved(tmp_path, BertModel, short)
    vlbert, head = ours()
    before = {name: tensor.clone() for name, tensor in vlbert.state_dict().items()}
    init_from_bert(vlbert, head, str(tmp_path), LETTERS)
    embedding = vlbert.embedding
    assert torch.equal(embedding.positions.weight[:40], theirs.embeddings.position_embeddings.weight)
    assert torch.equal(embedding.positions.weight[40:], before["embedding.positions.weight"][40:])
    both = theirs.embeddings.token_type_embeddings.weight.expand(2, -1)
    assert torch.equal(embedding.segments.weight[:2], both)  # of one kind of sentence, both of ours begin as it
    assert torch.equal(embedding.segments.weight[2], before["embedding.segments.weight"][2])
    shared = ("embedding.words.", "embedding.positions.", "embedding.segments.", "embedding.norm.", "encoder.")
    for name, tensor in vlbert.state_dict().items():
        assert torch.equal(tensor, before[name]) != name.startswith(shared), name


def test_a_bert_of_another_shape_or_vocabulary_or_a_cased_one_is_refused(tmp_path):
    for field, other, mine in (
        ("num_hidden_layers", 1, 2),
        ("vocab_size", 60, 57),
        ("hidden_act", "relu", "gelu"),
        ("layer_norm_eps", 1e-05, 1e-12),
    ):
        saved(tmp_path / field, BertModel, BertConfig(**BERT.to_dict() | {field: other}))
        shape = f"is a BERT of another shape: it has {field} {other}, the recipe's model has {mine}"
        with pytest.raises(ValueError, match=shape):
            init_from_bert(*ours(), str(tmp_path / field), LETTERS)
    saved(tmp_path, BertModel)
    other = Vocabulary([*LETTERS.tokens[:5], *reversed(LETTERS.tokens[5:])])
    with pytest.raises(ValueError, match="words would get the weights of other words; set --vocabulary=FILE"):
        init_from_bert(*ours(), str(tmp_path), other)
    for kind, pieces, lower in (("cased", LETTERS.tokens, False), ("capital", [*LETTERS.tokens[:-1], "Z"], True)):
        (tmp_path / kind).mkdir()
        BERT.save_pretrained(tmp_path / kind)
        (tmp_path / kind / "pieces.txt").write_text("".join(f"{piece}\n" for piece in pieces))
        BertTokenizer(str(tmp_path / kind / "pieces.txt"), do_lower_case=lower).save_pretrained(tmp_path / kind)
        with pytest.raises(ValueError, match=f"{kind} is a cased BERT"):
            bert_vocabulary(str(tmp_path / kind))


def test_files_that_are_no_bert_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    for name in ("torn", "page", "half", "wordless"):
        saved(tmp_path / name, BertModel, words=name != "wordless")
    weights = tmp_path / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    (tmp_path / "page" / "model.safetensors").write_text("<!DOCTYPE html><html></html>")
    half = {name: t for name, t in BertModel(BERT).state_dict().items() if "layer.1." not in name}
    BertModel(BERT).save_pretrained(tmp_path / "half", state_dict=half)

    def start(name: str) -> None:
        init_from_bert(*ours(), name, LETTERS)

    no_bert = "{} is neither the folder of a BERT nor the name of one on the Hub"
    for read, name, named in (
        *((start, name, no_bert) for name in ("empty", "gpt2", "torn", "page")),
        (bert_vocabulary, "nowhere", no_bert),
        (start, "half", "{} is not a complete BERT: it lacks bert.encoder.layer.1.attention"),
        (start, "wordless", "{} has no vocabulary; put the vocab.txt .* into its folder"),
        (bert_vocabulary, "wordless", "{} has no vocabulary; put the vocab.txt .* into its folder"),
    ):
        with pytest.raises(ValueError, match=named.format(name)):
            read(str(tmp_path / name))


@pytest.mark.parametrize("kind", ["bert", "theirs"])
def test_code_beside_a_bert_is_not_run(tmp_path, monkeypatch, kind):
    """transformers asks before it runs such code."""
    saved(tmp_path, BertForPreTraining)
    (tmp_path / "theirs.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\n"
        "from transformers import BertConfig as Config, BertForPreTraining as Model, BertTokenizer as Words\n"
    )
    for file, own in (
        ("config.json", {"AutoConfig": "theirs.Config", "AutoModelForPreTraining": "theirs.Model"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["theirs.Words", None]}),
    ):
        values = json.loads((tmp_path / file).read_text()) | {"auto_map": own}
        changed = {"model_type": kind} if file == "config.json" else {"tokenizer_class": "Words"}
        (tmp_path / file).write_text(json.dumps(values | changed))
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    model, head = ours()
    if kind == "bert":
        assert bert_vocabulary(str(tmp_path)).tokens == LETTERS.tokens
        init_from_bert(model, head, str(tmp_path), LETTERS)
    else:
        for read in (bert_vocabulary, lambda name: init_from_bert(model, head, name, LETTERS)):
            with pytest.raises(ValueError, match=str(tmp_path)):
                read(str(tmp_path))
    assert not (tmp_path / "ran").exists()
