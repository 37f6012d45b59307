"""The vocabulary, and the corpus of text alone: made, read, refused."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
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


def test_a_vocabulary_survives_its_file(tmp_path):
    (tmp_path / "vocab.txt").write_text(WORDS.text())
    again = Vocabulary.read(tmp_path / "vocab.txt")
    assert (again.tokens, again.hash) == (WORDS.tokens, WORDS.hash)


def test_a_wrong_vocabulary_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("<html>\n404\n")
    for call, named in (
        (lambda: Vocabulary.build(lambda: ["", " "], 100), "there is no word in the texts"),
        (lambda: Vocabulary.build(lambda: ["abcdefghijklmnopqrstuvwxyz"], 40), "26 different letters, .* 40 at most"),
        (lambda: Vocabulary.read(tmp_path / "vocab.txt"), r"vocab.txt lacks \[PAD\]"),
        (lambda: Vocabulary([*SPECIALS, "cat", "cat"]), "twice: 'cat'"),
    ):
        with pytest.raises(ValueError, match=named):
            call()


def test_the_corpus_is_flat_little_endian_integers(tmp_path):
    encode_corpus(lines("cat", "a cats"), WORDS, tmp_path)
    assert np.fromfile(tmp_path / "tokens.u16", "<u2").tolist() == [6, 5, 6, 8]
    assert np.fromfile(tmp_path / "offsets.i64", "<i8").tolist() == [0, 1, 4]


def test_a_corpus_is_made_again_only_when_its_inputs_change(tmp_path):
    file, captions = tmp_path / "lines.txt", tmp_path / "captions.tsv"
    file.write_text("a cat sat on a cat\n" * 3)
    captions.write_text("a white dog\thttp://example.org/1.jpg\nthe white dog\thttp://example.org/2.jpg\n")
    given = ([file], None, 60, [captions])
    made, is_new = make_corpus(tmp_path / "out", *given)
    assert (is_new, made["lines"]) == (True, 3)
    assert "dog" in Vocabulary.read(tmp_path / "out" / "vocab.txt").ids, "captions count too"
    before = (tmp_path / "out" / "tokens.u16").read_bytes()
    assert make_corpus(tmp_path / "out", *given) == (made, False)
    assert find_corpus(tmp_path / "out", *given) == made
    assert find_corpus(tmp_path / "out", [file], None, 61, [captions]) is None
    file.write_text("a cat\n")
    assert find_corpus(tmp_path / "out", *given) is None
    assert make_corpus(tmp_path / "out", *given)[1]
    assert (tmp_path / "out" / "tokens.u16").read_bytes() != before


def test_a_corpus_is_not_found_where_an_input_or_itself_cannot_be_read(tmp_path):
    file, out = tmp_path / "lines.txt", tmp_path / "out"
    file.write_text("a cat sat on a cat\n" * 3)
    captions = tmp_path / "captions.tsv"
    captions.write_text("a white dog\thttp://example.org/1.jpg\n")
    make_corpus(out, [file], None, 60, [captions])
    assert find_corpus(out, [file], None, 60, [captions])
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for a pipe"))
    signal.alarm(60)
    for name in ("gone", "folder", "pipe"):
        assert find_corpus(out, [file, tmp_path / name], None, 60, [captions]) is None
        assert find_corpus(out, [file], None, 60, [tmp_path / name]) is None
        assert find_corpus(out, [file], tmp_path / name, 60, [captions]) is None
    signal.alarm(0)
    wrong = json.dumps({"version": 1, "vocabulary": "x", "lines": -1, "tokens": 0})
    (out / "corpus.json").write_text(wrong)
    assert find_corpus(out, [file], None, 60, [captions]) is None
    (out / "corpus.json").unlink()
    (out / "corpus.json").symlink_to("/proc/self/mem")
    assert find_corpus(out, [file], None, 60, [captions]) is None


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


def corpus_program(folder: Path, file: Path, vocabulary: Path) -> list:
    return [sys.executable, "-m", "vlbert.data.corpus", folder, file, "--vocabulary", vocabulary]


def wait_for_tokens(folder: Path) -> None:
    """Until a process has begun to make a corpus there."""
    deadline = time.monotonic() + 60
    while not list(folder.glob(".making-*/tokens.u16")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_that_fails_leaves_the_old_corpus(tmp_path):
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("a cat\n")
    bad.write_bytes(b"sat\n" * 5000 + b"\xff\n")
    corpus_of(tmp_path, good)
    with pytest.raises(ValueError, match="bad.txt:5001"):
        corpus_of(tmp_path, bad)
    assert decoded(TextCorpus(tmp_path / "corpus", WORDS)) == ["a cat"]


def test_a_second_run_into_a_folder_leaves_and_a_killed_one_leaves_no_corpus(tmp_path):
    short, long, out = tmp_path / "short.txt", tmp_path / "long.txt", tmp_path / "corpus"
    short.write_text("a cat\n")
    corpus_of(tmp_path, short)
    long.write_bytes(b"sat on a cat\n" * 1_000_000)
    command = corpus_program(out, long, tmp_path / "words.txt")
    first = subprocess.Popen(command)
    try:
        wait_for_tokens(out)
        first.send_signal(signal.SIGSTOP)
        second = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert second.returncode == 1
        assert "another process is making a corpus in" in second.stderr
        assert "Traceback" not in second.stderr
    finally:
        first.kill()
        first.wait()
    assert decoded(TextCorpus(out, WORDS)) == ["a cat"]
    short.write_text("a cat sat\n")
    assert decoded(corpus_of(tmp_path, short)) == ["a cat sat"]
    files = [".lock", "corpus.json", "offsets.i64", "tokens.u16", "vocab.txt"]
    assert sorted(file.name for file in out.iterdir()) == files


def rewritten(name: str, kind: str, place: int, value: int) -> Callable[[Path], None]:
    """A change of one number of a file of the corpus."""

    def change(folder: Path) -> None:
        numbers = np.fromfile(folder / name, kind)
        numbers[place] = value
        numbers.tofile(folder / name)

    return change


def resized(name: str, by: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:by] if by < 0 else data + bytes(by))

    return change


def shifted(folder: Path) -> None:
    (np.fromfile(folder / "offsets.i64", "<i8") + 1).tofile(folder / "offsets.i64")


NO_CORPUS = "corpus holds no corpus.json that describes a corpus; make it with `vlbert corpus"
DAMAGED = [
    *((lambda folder, text=text: (folder / "corpus.json").write_text(text), NO_CORPUS) for text in ("{}", "[]", "7")),
    (lambda folder: (folder / "corpus.json").write_text('{"version": 1, "vocabulary": "x", "lines": "3"}'), NO_CORPUS),
    (lambda folder: (folder / "corpus.json").unlink(), "holds no corpus.json"),
    (resized("tokens.u16", -1), r"tokens.u16 is torn or gone: it has \d+ bytes, and \d+ by"),
    (resized("offsets.i64", 2), r"offsets.i64 is torn or gone: it has \d+ bytes, and \d+ by"),
    (lambda folder: (folder / "tokens.u16").unlink(), "tokens.u16 is torn or gone"),
    (rewritten("tokens.u16", "<u2", 3, len(WORDS)), f"tokens.u16 is damaged: .*token {len(WORDS)}, and the vocabulary"),
    (rewritten("tokens.u16", "<u2", 0, 65535), "tokens.u16 is damaged: .*token 65535"),
    (rewritten("offsets.i64", "<i8", 1, -1), "offsets.i64 is damaged: .*line 0 ends before it begins"),
    (rewritten("offsets.i64", "<i8", 1, 2**40), "offsets.i64 is damaged: .*line 1 ends before it begins"),
    (shifted, "it goes from 1 to 5, not from 0 to 4"),
]


@pytest.mark.parametrize(("damage", "named"), DAMAGED)
def test_a_damaged_corpus_is_refused_by_name_and_made_again(tmp_path, monkeypatch, damage, named):
    (tmp_path / "lines.txt").write_text("a cat sat\non\n")
    corpus_of(tmp_path, tmp_path / "lines.txt")
    damage(tmp_path / "corpus")
    monkeypatch.setattr("vlbert.data.corpus._TOKENS_AT_ONCE", 2)
    with pytest.raises(ValueError, match=named):
        TextCorpus(tmp_path / "corpus", WORDS)
    if "damaged" not in named and damage is not shifted:  # a look at its sizes finds these; their numbers are not read
        assert decoded(corpus_of(tmp_path, tmp_path / "lines.txt")) == ["a cat sat", "on"]


def test_a_corpus_of_another_vocabulary_is_refused(tmp_path):
    encode_corpus(lines("cat"), WORDS, tmp_path)
    with pytest.raises(ValueError, match="tokenise it again"):
        TextCorpus(tmp_path, Vocabulary([*SPECIALS, "dog"]))


def test_wrong_inputs_are_refused_before_a_folder_is_made(tmp_path):
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


def test_a_new_corpus_leaves_alone_what_a_training_reads(tmp_path):
    file = tmp_path / "lines.txt"
    file.write_text("a cat sat\n")
    mapped = corpus_of(tmp_path, file)
    file.write_text("on\n")
    assert decoded(corpus_of(tmp_path, file)) == ["on"]
    assert decoded(mapped) == ["a cat sat"]


@pytest.mark.parametrize("length", [1, 2, 5, 11, 12, 100])
def test_passages_are_lines_one_behind_the_other(tmp_path, length):
    texts = ["a cat", "sat on", "a cat sat on a cat .", "on"]
    encode_corpus(lines(*texts), WORDS, tmp_path)
    corpus = TextCorpus(tmp_path, WORDS)
    tokens = [WORDS.encode(text).tolist() for text in texts]
    expected = [sum((tokens * 2)[line : line + 4], [])[:length] for line in range(4)]
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
    # In kB. As a whole, the lines would be 100 MB of strings and 16 MB of offsets, and the long line's tokens 200 MB.
    assert peaks["many"] < peaks["few"] + 15_000, peaks
    assert peaks["long"] < peaks["few"] + 60_000, peaks
