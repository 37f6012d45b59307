"""The vocabulary, and the corpus of text alone: made, read, refused."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from writing import wait_for

from vlbert.data.corpus import TextCorpus, encode_corpus, make_corpus
from vlbert.data.vocabulary import SPECIALS, Vocabulary

WORDS = Vocabulary([*SPECIALS, "a", "cat", "sat", "##s", "##ting", "on", "."])


def corpus_of(folder: Path, *files: Path) -> TextCorpus:
    """The corpus of these files with WORDS."""
    (folder / "words.txt").write_text(WORDS.text())
    make_corpus(folder / "corpus", files, folder / "words.txt", 0, [])
    return TextCorpus(folder / "corpus", WORDS)


def decoded(corpus: TextCorpus) -> list[str]:
    """The lines of a corpus."""
    places = zip(corpus.offsets[:-1], corpus.offsets[1:], strict=True)
    return [WORDS.decode(corpus.tokens[start:end]) for start, end in places]


def test_the_same_texts_build_the_same_vocabulary_in_every_process(tmp_path):
    texts = [f"the {a} {b} is big than the {a}" for a in ("red", "blue") for b in ("cat", "dog")]
    (tmp_path / "lines.txt").write_text("\n".join(texts))
    program = (
        "import sys; from vlbert.data.vocabulary import Vocabulary; "
        "print(Vocabulary.build(lambda: open(sys.argv[1]), 90).hash)"
    )
    built = Vocabulary.build(lambda: texts, 90)
    for seed in ("1", "2"):
        command, hashes = (
            [sys.executable, "-c", program, str(tmp_path / "lines.txt")],
            os.environ | {"PYTHONHASHSEED": seed},
        )
        assert subprocess.check_output(command, env=hashes, text=True).strip() == built.hash
    assert len(built) <= 90
    assert built.tokens[:5] == list(SPECIALS)
    assert "[UNK]" not in built.decode(built.encode(texts[0]))
    (tmp_path / "vocab.txt").write_text(built.text())
    assert Vocabulary.read(tmp_path / "vocab.txt").hash == built.hash


def test_a_wrong_vocabulary_is_refused(tmp_path):
    cased, text = tmp_path / "cased.txt", tmp_path / "text.txt"
    cased.write_text("\n".join([*SPECIALS, "[unused1]", "the", "Paris"]))
    text.write_text("The dog is in Paris.")
    for call, named in (
        (lambda: Vocabulary.build(lambda: ["", " "], 100), "the texts have no words"),
        (lambda: Vocabulary.build(lambda: ["abcdefghijklmnopqrstuvwxyz"], 40), "26 different letters, .* only 40"),
        (lambda: Vocabulary([*SPECIALS, "cat", "cat"]), "twice: 'cat'"),
        (lambda: Vocabulary([*SPECIALS, "##ж", "Ж"]), "the vocabulary is a cased BERT's: 'Ж'; .*use an uncased one"),
        (lambda: make_corpus(tmp_path / "c", [text], cased, 0, []), f"{cased} is a cased BERT's: 'Paris'"),
    ):
        with pytest.raises(ValueError, match=named):
            call()


def test_files_are_read_as_they_are(tmp_path):
    one, two = tmp_path / "one.txt", tmp_path / "two"
    one.write_bytes(b"\xef\xbb\xbfA cat\r\n\r\n  \n\nsat on.")  # a byte order mark, CRLF, empty lines, no last newline
    two.touch()
    assert decoded(corpus_of(tmp_path, one, two, one)) == ["a cat", "sat on .", "a cat", "sat on ."]


def test_a_corpus_is_made_again_only_when_its_inputs_change(tmp_path):
    file, captions, made = tmp_path / "lines.txt", tmp_path / "captions.tsv", tmp_path / "out" / "corpus.json"
    file.write_text("a cat sat on a cat\n" * 3)
    captions.write_text("a white dog\thttp://example.org/1.jpg\nthe white dog\thttp://example.org/2.jpg\n")

    def is_new(size: int = 60) -> bool:
        before = made.stat().st_ino if made.exists() else None
        make_corpus(tmp_path / "out", [file], None, size, [captions])
        return made.stat().st_ino != before

    assert is_new()
    assert "dog" in Vocabulary.read(tmp_path / "out" / "vocab.txt").ids, "captions count too"
    assert not is_new()
    assert is_new(61)
    file.write_text("a cat\n")
    assert is_new(61)


def test_a_killed_run_leaves_the_old_corpus(tmp_path):
    short, long, out = tmp_path / "short.txt", tmp_path / "long.txt", tmp_path / "corpus"
    short.write_text("a cat\n")
    mapped = corpus_of(tmp_path, short)
    long.write_bytes(b"sat on a cat\n" * 1_000_000)
    program = [sys.executable, "-m", "vlbert", "corpus", out, long, "--vocabulary", tmp_path / "words.txt"]
    with subprocess.Popen(program) as running:
        wait_for(lambda: list(out.glob(".making-*/tokens.u16")), 60)
        running.kill()
    assert decoded(TextCorpus(out, WORDS)) == ["a cat"]
    short.write_text("a cat sat\n")
    assert decoded(corpus_of(tmp_path, short)) == ["a cat sat"]
    assert decoded(mapped) == ["a cat"], "what a training has mapped stays"


def test_a_corpus_of_which_half_was_replaced_is_none(tmp_path, monkeypatch):
    encode_corpus(["a cat"], WORDS, tmp_path)
    replace = os.replace

    def until_the_second(source: Path, target: Path) -> None:
        if target.name == "offsets.i64":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr("os.replace", until_the_second)
    with pytest.raises(KeyboardInterrupt):
        encode_corpus(["a sat"], WORDS, tmp_path)  # of as many tokens and lines
    with pytest.raises(ValueError, match="no complete corpus"):
        TextCorpus(tmp_path, WORDS)


def test_wrong_inputs_are_named_and_leave_the_old_corpus(tmp_path):
    good, bad, blank, page = (tmp_path / name for name in ("good", "bad", "blank", "page"))
    good.write_text("a cat\n")
    bad.write_bytes(b"a cat\nsat on \xff")
    blank.write_bytes(b"\n \r\n" * 9)
    page.write_text("<html>\n404\n")
    corpus_of(tmp_path, good)
    words = tmp_path / "words.txt"
    for files, vocabulary, message in (
        ([good, tmp_path], words, f"there is no file {tmp_path}; name"),
        ([good], tmp_path / "absent", f"there is no file {tmp_path}/absent; name"),
        ([blank], words, "no line with a word for .*; name files that have text"),
        ([good], page, "page is a web page"),
        ([good, page], words, "page is a web page"),
        ([good, bad], words, "bad:2 is not UTF-8 .*0xff.*convert or unpack it"),
    ):
        with pytest.raises(ValueError, match=message):
            make_corpus(tmp_path / "corpus", files, vocabulary, 60, [])
        assert decoded(TextCorpus(tmp_path / "corpus", WORDS)) == ["a cat"]
    assert not list(tmp_path.glob("corpus/.*"))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda folder: (folder / "corpus.json").unlink(), "no complete corpus"),
        (lambda folder: (folder / "tokens.u16").unlink(), "no complete corpus .*tokens.u16"),
        (lambda folder: os.truncate(folder / "tokens.u16", 6), "no complete corpus .*tokens.u16 has 3 numbers, but 4 "),
        (lambda folder: encode_corpus(["dog"], Vocabulary([*SPECIALS, "dog"]), folder), "tokenise it again"),
    ],
)
def test_a_damaged_corpus_is_refused_by_name(tmp_path, damage, named):
    encode_corpus(["a cat sat", "on"], WORDS, tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=named):
        TextCorpus(tmp_path, WORDS)


@pytest.mark.parametrize("length", [1, 2, 5, 11, 12, 100])
def test_passages_are_lines_one_behind_the_other(tmp_path, length):
    texts = ["a cat", "sat on", "a cat sat on a cat .", "on"]
    encode_corpus(texts, WORDS, tmp_path)
    corpus = TextCorpus(tmp_path, WORDS)
    assert np.fromfile(tmp_path / "offsets.i64", "<i8").tolist() == [0, 2, 4, 11, 12], "little-endian, as tokens are"
    assert np.fromfile(tmp_path / "tokens.u16", "<u2")[:4].tolist() == [5, 6, 7, 10]
    tokens = [WORDS.encode(text).tolist() for text in texts]
    expected = [sum((tokens * 2)[line : line + 4], [])[:length] for line in range(4)]
    assert corpus.passages(np.array([3, 0, 1, 2, 3]), length).tolist() == [expected[3], *expected]
    with pytest.raises(IndexError):
        corpus.passages(np.array([4]), length)
