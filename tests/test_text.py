import hashlib
import subprocess
import sys

import numpy as np
import pytest

from vlbert.text import SPECIALS, TextCorpus, Vocabulary, encode_corpus, make_corpus

WORDS = Vocabulary([*SPECIALS, "a", "cat", "sat", "##s", "##ting", "on", "."])


def test_words_are_cut_into_the_longest_pieces_and_lowercased():
    tokens = WORDS.encode("A CAT, sitting")
    assert WORDS.decode(tokens) == "a cat [UNK] [UNK]"
    assert WORDS.encode("cats").tolist() == [WORDS.ids["cat"], WORDS.ids["##s"]]


def test_pieces_of_one_word_share_its_number():
    tokens = np.array([WORDS.ids[p] for p in ("a", "cat", "##s", "sat", "##ting", "##s")])
    assert WORDS.word_of(tokens).tolist() == [0, 1, 1, 2, 2, 2]
    assert WORDS.word_of(tokens[2:]).tolist() == [-1, 0, 0, 0]


def test_the_same_texts_build_the_same_vocabulary_in_every_process(tmp_path):
    lines = [
        f"the {a} {b} is {c} than the {a}"
        for a in ("red", "blue", "green")
        for b in ("cat", "dog")
        for c in ("bigger", "smaller")
    ]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    program = (
        "import sys; from vlbert.text import Vocabulary; print(Vocabulary.build(lambda: open(sys.argv[1]), 90).hash)"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "lines.txt")], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(3)
    }
    assert len(hashes) == 1
    built = Vocabulary.build(lambda: lines, 90)
    assert len(built) <= 90
    assert built.pieces[:5] == list(SPECIALS)
    assert "[UNK]" not in built.decode(built.encode(lines[0]))


def test_a_vocabulary_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="there is no word in the texts"):
        Vocabulary.build(lambda: ["", " "], 100)
    with pytest.raises(ValueError, match="26 different letters, which take 57 pieces .* 40 at most"):
        Vocabulary.build(lambda: ["abcdefghijklmnopqrstuvwxyz"], 40)


def test_a_vocabulary_survives_its_file(tmp_path):
    (tmp_path / "vocab.txt").write_text(WORDS.text())
    again = Vocabulary.read(tmp_path / "vocab.txt")
    assert (again.pieces, again.hash) == (WORDS.pieces, WORDS.hash)


def test_a_file_that_is_no_vocabulary_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("<html>\n404\n")
    with pytest.raises(ValueError, match=r"vocab.txt lacks \[PAD\]"):
        Vocabulary.read(tmp_path / "vocab.txt")
    with pytest.raises(ValueError, match="twice: 'cat'"):
        Vocabulary([*SPECIALS, "cat", "cat"])


def test_a_passage_goes_on_over_lines_and_round_the_end(tmp_path):
    encode_corpus(["a cat", "", "sat on", "a cat sat on a cat ."], WORDS, tmp_path)
    corpus = TextCorpus(tmp_path, WORDS)
    assert len(corpus) == 3
    assert WORDS.decode(corpus.passage(0, 5)) == "a cat sat on a"
    assert WORDS.decode(corpus.passage(2, 9)) == "a cat sat on a cat . a cat"
    assert len(corpus.passage(1, 100)) == 11, "no line is taken twice"


def test_the_corpus_is_flat_little_endian_integers(tmp_path):
    encode_corpus(["cat", "a cats"], WORDS, tmp_path)
    assert np.fromfile(tmp_path / "tokens.u16", "<u2").tolist() == [6, 5, 6, 8]
    assert np.fromfile(tmp_path / "offsets.i64", "<i8").tolist() == [0, 1, 4]


def test_a_corpus_of_another_vocabulary_is_refused(tmp_path):
    encode_corpus(["cat"], WORDS, tmp_path)
    with pytest.raises(ValueError, match="tokenise it again"):
        TextCorpus(tmp_path, Vocabulary([*SPECIALS, "dog"]))
    with pytest.raises(ValueError, match="holds no corpus.json"):
        TextCorpus(tmp_path / "elsewhere", WORDS)
    with pytest.raises(ValueError, match="no line with a word"):
        encode_corpus(["", " "], WORDS, tmp_path)


def test_a_corpus_is_made_once_and_again_when_its_inputs_change(tmp_path):
    lines, captions = tmp_path / "lines.txt", tmp_path / "captions.tsv"
    lines.write_text("a cat sat on a cat\n" * 3)
    captions.write_text("a white dog\thttp://example.org/1.jpg\nthe white dog\thttp://example.org/2.jpg\n")
    about, made = make_corpus(tmp_path / "out", [lines], None, 60, [captions])
    assert made
    assert about["lines"] == 3
    assert "dog" in Vocabulary.read(tmp_path / "out" / "vocab.txt").ids, "captions count too"
    before = hashlib.sha256((tmp_path / "out" / "tokens.u16").read_bytes()).hexdigest()
    assert make_corpus(tmp_path / "out", [lines], None, 60, [captions]) == (about, False)
    lines.write_text("a cat\n")
    assert make_corpus(tmp_path / "out", [lines], None, 60, [captions])[1]
    assert hashlib.sha256((tmp_path / "out" / "tokens.u16").read_bytes()).hexdigest() != before


def test_accents_and_punctuation_are_treated_as_bert_does():
    words = Vocabulary([*SPECIALS, "cafe", "!", "-", "x"])
    assert words.decode(words.encode("Café!x-x")) == "cafe ! x - x"
