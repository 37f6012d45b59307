import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from vlbert.data.corpus import TextCorpus, _parts, encode_corpus, find_corpus, make_corpus
from vlbert.data.vocabulary import SPECIALS, Vocabulary

WORDS = Vocabulary([*SPECIALS, "a", "cat", "sat", "##s", "##ting", "on", "."])


def lines(*texts: str) -> list[tuple[str, bool]]:
    """Whole lines, as encode_corpus takes them."""
    return [(text, True) for text in texts]


def corpus_of(folder: Path, *files: Path) -> TextCorpus:
    """The corpus of these files with WORDS."""
    (folder / "words.txt").write_text(WORDS.text())
    make_corpus(folder / "corpus", files, folder / "words.txt", 0, [])
    return TextCorpus(folder / "corpus", WORDS)


def decoded(corpus: TextCorpus) -> list[str]:
    """The lines of a corpus."""
    return [
        WORDS.decode(corpus.tokens[start:end])
        for start, end in zip(corpus.offsets[:-1], corpus.offsets[1:], strict=True)
    ]


def test_words_are_cut_into_the_longest_tokens_and_lowercased():
    tokens = WORDS.encode("A CAT, sitting")
    assert WORDS.decode(tokens) == "a cat [UNK] [UNK]"
    assert WORDS.encode("cats").tolist() == [WORDS.ids["cat"], WORDS.ids["##s"]]


def test_tokens_of_one_word_share_its_number():
    tokens = np.array([WORDS.ids[p] for p in ("a", "cat", "##s", "sat", "##ting", "##s")])
    assert WORDS.word_of(tokens).tolist() == [0, 1, 1, 2, 2, 2]
    assert WORDS.word_of(tokens[2:]).tolist() == [-1, 0, 0, 0]


def test_the_same_texts_build_the_same_vocabulary_in_every_process(tmp_path):
    texts = [
        f"the {a} {b} is {c} than the {a}"
        for a in ("red", "blue", "green")
        for b in ("cat", "dog")
        for c in ("bigger", "smaller")
    ]
    (tmp_path / "lines.txt").write_text("\n".join(texts))
    program = (
        "import sys; from vlbert.data.vocabulary import Vocabulary; "
        "print(Vocabulary.build(lambda: open(sys.argv[1]), 90).hash)"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "lines.txt")], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(3)
    }
    assert len(hashes) == 1
    built = Vocabulary.build(lambda: texts, 90)
    assert len(built) <= 90
    assert built.tokens[:5] == list(SPECIALS)
    assert "[UNK]" not in built.decode(built.encode(texts[0]))


def test_a_vocabulary_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="there is no word in the texts"):
        Vocabulary.build(lambda: ["", " "], 100)
    with pytest.raises(ValueError, match="26 different letters, which take 57 tokens .* 40 at most"):
        Vocabulary.build(lambda: ["abcdefghijklmnopqrstuvwxyz"], 40)


def test_a_vocabulary_survives_its_file(tmp_path):
    (tmp_path / "vocab.txt").write_text(WORDS.text())
    again = Vocabulary.read(tmp_path / "vocab.txt")
    assert (again.tokens, again.hash) == (WORDS.tokens, WORDS.hash)


def test_a_file_that_is_no_vocabulary_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("<html>\n404\n")
    with pytest.raises(ValueError, match=r"vocab.txt lacks \[PAD\]"):
        Vocabulary.read(tmp_path / "vocab.txt")
    with pytest.raises(ValueError, match="twice: 'cat'"):
        Vocabulary([*SPECIALS, "cat", "cat"])


def test_a_passage_goes_on_over_lines_and_round_the_end(tmp_path):
    encode_corpus(lines("a cat", "", "sat on", "a cat sat on a cat ."), WORDS, tmp_path)
    corpus = TextCorpus(tmp_path, WORDS)
    assert len(corpus) == 3
    assert [WORDS.decode(tokens) for tokens in corpus.passages(np.array([0]), 5)] == ["a cat sat on a"]
    assert [WORDS.decode(tokens) for tokens in corpus.passages(np.array([2]), 9)] == ["a cat sat on a cat . a cat"]
    assert corpus.passages(np.array([1]), 100).shape == (1, 11), "no line is taken twice"


def test_the_corpus_is_flat_little_endian_integers(tmp_path):
    encode_corpus(lines("cat", "a cats"), WORDS, tmp_path)
    assert np.fromfile(tmp_path / "tokens.u16", "<u2").tolist() == [6, 5, 6, 8]
    assert np.fromfile(tmp_path / "offsets.i64", "<i8").tolist() == [0, 1, 4]


def test_a_corpus_of_another_vocabulary_is_refused(tmp_path):
    encode_corpus(lines("cat"), WORDS, tmp_path)
    with pytest.raises(ValueError, match="tokenise it again"):
        TextCorpus(tmp_path, Vocabulary([*SPECIALS, "dog"]))
    with pytest.raises(ValueError, match="holds no corpus.json"):
        TextCorpus(tmp_path / "elsewhere", WORDS)
    with pytest.raises(ValueError, match="no line with a word"):
        encode_corpus(lines("", " "), WORDS, tmp_path)


def test_a_corpus_is_made_once_and_again_when_its_inputs_change(tmp_path):
    file, captions = tmp_path / "lines.txt", tmp_path / "captions.tsv"
    file.write_text("a cat sat on a cat\n" * 3)
    captions.write_text("a white dog\thttp://example.org/1.jpg\nthe white dog\thttp://example.org/2.jpg\n")
    about, made = make_corpus(tmp_path / "out", [file], None, 60, [captions])
    assert made
    assert about["lines"] == 3
    assert "dog" in Vocabulary.read(tmp_path / "out" / "vocab.txt").ids, "captions count too"
    before = hashlib.sha256((tmp_path / "out" / "tokens.u16").read_bytes()).hexdigest()
    assert make_corpus(tmp_path / "out", [file], None, 60, [captions]) == (about, False)
    assert find_corpus(tmp_path / "out", [file], None, 60, [captions]) == about
    assert find_corpus(tmp_path / "other", [file], None, 60, [captions]) is None
    assert find_corpus(tmp_path / "out", [file], None, 61, [captions]) is None
    assert find_corpus(tmp_path / "out", [tmp_path / "gone"], None, 60, [captions]) is None
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for a pipe"))
    signal.alarm(20)
    for name in ("folder", "pipe"):
        assert find_corpus(tmp_path / "out", [file, tmp_path / name], None, 60, [captions]) is None
        assert find_corpus(tmp_path / "out", [file], None, 60, [tmp_path / name]) is None
        assert find_corpus(tmp_path / "out", [file], tmp_path / name, 60, [captions]) is None
    signal.alarm(0)
    (tmp_path / "unreadable").mkdir()
    (tmp_path / "unreadable" / "corpus.json").symlink_to("/proc/self/mem")
    assert find_corpus(tmp_path / "unreadable", [file], None, 60, [captions]) is None
    (tmp_path / "negative").mkdir()
    wrong = {"version": 1, "vocabulary": "x", "lines": -1, "tokens": 0}
    for name, text in (("corpus.json", json.dumps(wrong)), ("offsets.i64", ""), ("tokens.u16", "")):
        (tmp_path / "negative" / name).write_text(text)
    assert find_corpus(tmp_path / "negative", [file], None, 60, [captions]) is None
    file.write_text("a cat\n")
    assert find_corpus(tmp_path / "out", [file], None, 60, [captions]) is None
    assert make_corpus(tmp_path / "out", [file], None, 60, [captions])[1]
    assert hashlib.sha256((tmp_path / "out" / "tokens.u16").read_bytes()).hexdigest() != before


def test_accents_and_punctuation_are_treated_as_bert_does():
    words = Vocabulary([*SPECIALS, "cafe", "!", "-", "x"])
    assert words.decode(words.encode("Café!x-x")) == "cafe ! x - x"


def test_files_are_read_as_they_are_plain_or_gzip_of_several_members(tmp_path):
    one, two, three = tmp_path / "one.txt", tmp_path / "two.txt", tmp_path / "three"
    one.write_bytes(b"\xef\xbb\xbfA cat\r\n\r\n  \n\nsat on.")  # a byte order mark, CRLF, empty lines, no last newline
    two.write_bytes(gzip.compress(b"a a\ncat ") + gzip.compress(b"cat\nsat sat\n"))  # whatever its name says
    three.write_bytes(b"")
    corpus = corpus_of(tmp_path, one, two, three, one)
    assert decoded(corpus) == ["a cat", "sat on .", "a a", "cat cat", "sat sat", "a cat", "sat on ."]


def test_a_line_read_in_parts_has_the_tokens_of_the_whole(tmp_path):
    texts = ["cats sitting on a cat.\t" * 9, "é cat " * 20, "猫" * 50, "sat", "a" * 40, ""]
    (tmp_path / "lines.txt").write_text("\n".join(texts))
    words = Vocabulary([*SPECIALS, "a", "cat", "sat", "##s", "##ting", "on", ".", "e", "猫"])
    expected = [words.encode(text).tolist() for text in texts[:-1]]
    for size in (2**18, 64, 17, 9):
        encode_corpus(_parts([tmp_path / "lines.txt"], size), words, tmp_path / str(size))
        corpus = TextCorpus(tmp_path / str(size), words)
        found = [corpus.tokens[a:b].tolist() for a, b in zip(corpus.offsets[:-1], corpus.offsets[1:], strict=True)]
        # A word of 40 letters without a blank is cut where the part ends: the only one that may differ.
        assert found[:4] == expected[:4]
        assert len(found) == 5


@pytest.mark.parametrize("line", [1, 3, 4])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_bad_bytes_are_named_by_file_and_line(tmp_path, line, pack):
    texts = [b"a cat", b"", b"sat on", b"cat"]
    texts[line - 1] += b" \xff"
    (tmp_path / "lines").write_bytes(pack(b"\n".join(texts)))
    with pytest.raises(ValueError, match=rf"lines:{line} is not UTF-8 .*0xff.*convert it"):
        corpus_of(tmp_path, tmp_path / "lines")
    assert not list(tmp_path.glob("corpus/[!.]*"))
    assert not list(tmp_path.glob("corpus/.making-*"))


def test_a_gzip_file_cut_short_or_damaged_is_named(tmp_path):
    packed = gzip.compress(b"a cat\n" * 1000)
    damaged = bytearray(packed)
    damaged[-6] ^= 1  # in the checksum
    for data in (packed[:-9], bytes(damaged), packed + b"more"):
        (tmp_path / "lines.gz").write_bytes(data)
        with pytest.raises(ValueError, match=r"lines\.gz:\d+: the gzip file is cut short or damaged"):
            corpus_of(tmp_path, tmp_path / "lines.gz")


def test_a_run_that_fails_or_is_killed_leaves_the_folder_as_it_was(tmp_path):
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("a cat\n")
    bad.write_bytes(b"sat\n" * 5000 + b"\xff\n")
    corpus = corpus_of(tmp_path, good)
    with pytest.raises(ValueError, match="bad.txt:5001"):
        corpus_of(tmp_path, bad)
    assert decoded(TextCorpus(tmp_path / "corpus", WORDS)) == decoded(corpus) == ["a cat"]

    bad.write_bytes(b"sat on a cat\n" * 10**6)
    command = [
        sys.executable,
        "-m",
        "vlbert.data.corpus",
        tmp_path / "new",
        bad,
        "--vocabulary",
        tmp_path / "words.txt",
    ]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 60
        while not list((tmp_path / "new").glob(".making-*/tokens.u16")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with pytest.raises(ValueError, match="holds no corpus.json"):
        TextCorpus(tmp_path / "new", WORDS)
    make_corpus(tmp_path / "new", [good], tmp_path / "words.txt", 0, [])
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == [
        ".lock",
        "corpus.json",
        "offsets.i64",
        "tokens.u16",
        "vocab.txt",
    ]


def test_of_two_runs_into_one_folder_the_second_leaves_and_the_old_corpus_stays(tmp_path):
    long, short = tmp_path / "long.txt", tmp_path / "short.txt"
    short.write_text("a cat\n")
    corpus_of(tmp_path, short)
    long.write_bytes(b"sat on a cat\n" * 100_000)
    command = [
        sys.executable,
        "-m",
        "vlbert.data.corpus",
        tmp_path / "corpus",
        long,
        "--vocabulary",
        tmp_path / "words.txt",
    ]
    first = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 60
        while not list((tmp_path / "corpus").glob(".making-*/tokens.u16")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        first.send_signal(signal.SIGSTOP)
        second = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert second.returncode == 1
        assert "another process is making a corpus in" in second.stderr
        assert "Traceback" not in second.stderr
        assert decoded(TextCorpus(tmp_path / "corpus", WORDS)) == ["a cat"]
    finally:
        first.send_signal(signal.SIGCONT)
        code = first.wait(60)
    assert code == 0
    assert len(TextCorpus(tmp_path / "corpus", WORDS)) == 100_000


@pytest.mark.parametrize("text", ["{}", "[]", "7", '{"version": 1}', '{"version": 1, "vocabulary": "x", "lines": "3"}'])
def test_a_corpus_json_that_describes_nothing_is_refused_by_name_and_made_again(tmp_path, text):
    (tmp_path / "lines.txt").write_text("a cat sat\n")
    corpus_of(tmp_path, tmp_path / "lines.txt")
    (tmp_path / "corpus" / "corpus.json").write_text(text)
    message = (
        rf"{tmp_path}/corpus holds no corpus.json that describes a corpus; make it with `python -m vlbert.data.corpus"
    )
    with pytest.raises(ValueError, match=message):
        TextCorpus(tmp_path / "corpus", WORDS)
    assert decoded(corpus_of(tmp_path, tmp_path / "lines.txt")) == ["a cat sat"]


def test_inputs_that_are_no_files_and_an_out_that_is_one_are_refused_before_a_folder_is_made(tmp_path):
    words, file, empty, blank, page = (tmp_path / name for name in ("words", "file", "empty", "blank", "page"))
    words.write_text(WORDS.text())
    file.write_text("a cat\n")
    empty.write_bytes(b"")
    blank.write_bytes(gzip.compress(b"\n \r\n" * 9))
    page.write_text("<html>\n404\n")
    refused = [
        ([file, tmp_path], words, [], f"{tmp_path} is a folder, a pipe or a device; name files"),
        ([Path("/dev/null")], words, [], "/dev/null is a folder, a pipe or a device; name files"),
        ([file], tmp_path / "absent", [], f"there is no file {tmp_path}/absent; see how"),
        ([file], None, [tmp_path / "absent"], f"there is no file {tmp_path}/absent; see how"),
        ([empty, blank], words, [], f"no line with a word in {empty}, {blank}; name files with text"),
        ([file], page, [], r"page lacks \[PAD\]"),
    ]
    for files, vocabulary, captions, message in refused:
        with pytest.raises(ValueError, match=message):
            make_corpus(tmp_path / "corpus", files, vocabulary, 60, captions)
        assert not (tmp_path / "corpus").exists()
    with pytest.raises(ValueError, match=f"{file} is a file; name a folder"):
        make_corpus(file, [file], words, 0, [])


def test_a_corpus_made_anew_leaves_alone_what_a_training_reads(tmp_path):
    file = tmp_path / "lines.txt"
    file.write_text("a cat sat\n")
    mapped = corpus_of(tmp_path, file)
    file.write_text("on\n")
    assert decoded(corpus_of(tmp_path, file)) == ["on"]
    assert decoded(mapped) == ["a cat sat"]


@pytest.mark.parametrize("name", ["tokens.u16", "offsets.i64"])
def test_a_torn_corpus_is_refused_by_name_and_made_again(tmp_path, name):
    (tmp_path / "lines.txt").write_text("a cat sat\non\n")
    corpus_of(tmp_path, tmp_path / "lines.txt")
    file = tmp_path / "corpus" / name
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole + b"\0\0", None):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{name} is torn or gone: it has \d+ bytes, and {len(whole)} by"):
            TextCorpus(tmp_path / "corpus", WORDS)
        assert decoded(corpus_of(tmp_path, tmp_path / "lines.txt")) == ["a cat sat", "on"]


@pytest.mark.parametrize(
    ("name", "kind", "place", "value", "says"),
    [
        ("tokens.u16", "<u2", 3, len(WORDS), f"holds token {len(WORDS)}, and the vocabulary has {len(WORDS)}"),
        ("tokens.u16", "<u2", 0, 65535, "holds token 65535"),
        ("offsets.i64", "<i8", 1, -1, "line 0 ends before it begins"),
        ("offsets.i64", "<i8", 1, 2**40, "line 1 ends before it begins"),
    ],
)
def test_a_corpus_whose_numbers_point_outside_is_refused(tmp_path, monkeypatch, name, kind, place, value, says):
    (tmp_path / "lines.txt").write_text("a cat sat\non\n")
    corpus_of(tmp_path, tmp_path / "lines.txt")
    file = tmp_path / "corpus" / name
    numbers = np.fromfile(file, kind)
    numbers[place] = value
    numbers.tofile(file)
    monkeypatch.setattr("vlbert.data.corpus._TOKENS_AT_ONCE", 2)
    with pytest.raises(ValueError, match=rf"{name} is damaged: .*{says}.*tokenise it again"):
        TextCorpus(tmp_path / "corpus", WORDS)


def test_offsets_that_do_not_reach_from_end_to_end_are_refused(tmp_path):
    (tmp_path / "lines.txt").write_text("a cat sat\non\n")
    corpus = corpus_of(tmp_path, tmp_path / "lines.txt")
    (corpus.offsets + 1).tofile(tmp_path / "corpus" / "offsets.i64")
    with pytest.raises(ValueError, match="it goes from 1 to 5, not from 0 to 4"):
        TextCorpus(tmp_path / "corpus", WORDS)


@pytest.mark.parametrize("length", [1, 2, 5, 11, 12, 100])
def test_passages_are_lines_one_behind_the_other(tmp_path, length):
    texts = ["a cat", "sat on", "a cat sat on a cat .", "on"]
    encode_corpus(lines(*texts), WORDS, tmp_path)
    corpus = TextCorpus(tmp_path, WORDS)
    pieces = [WORDS.encode(text).tolist() for text in texts]
    expected = [sum((pieces * 2)[line : line + 4], [])[:length] for line in range(4)]
    assert corpus.passages(np.array([0, 1, 2, 3]), length).tolist() == expected
    assert corpus.passages(np.array([3, 0, 3]), length).tolist() == [expected[i] for i in (3, 0, 3)]
    assert corpus.passages(np.array([0]), length).dtype == np.int64
    with pytest.raises(IndexError):
        corpus.passages(np.array([4]), length)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_lines_or_their_length(tmp_path):
    (tmp_path / "words.txt").write_text(WORDS.text())
    program = (
        "import resource, sys; from pathlib import Path; from vlbert.data.corpus import make_corpus; "
        "make_corpus(Path(sys.argv[1]), [Path(sys.argv[2])], Path(sys.argv[3]), 0, []); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = {}
    for name, data in (("few", b"cat\n" * 1000), ("many", b"cat\n" * 2_000_000), ("long", b"cat " * 2_000_000)):
        (tmp_path / name).write_bytes(data)
        command = [sys.executable, "-c", program, tmp_path / f"{name}-corpus", tmp_path / name, tmp_path / "words.txt"]
        peaks[name] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    # In kB. As a whole, the lines would be 100 MB of strings and 16 MB of offsets, and the long line's pieces 200 MB.
    assert peaks["many"] < peaks["few"] + 15_000, peaks
    assert peaks["long"] < peaks["few"] + 60_000, peaks
