"""Tokenise a text-only corpus into one flat file of token ids: `vlbert corpus`.

Its files are UTF-8, plain or gzip, of any size: neither a file nor a long line is ever in memory as a whole.
"""

import contextlib
import fcntl
import gzip
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from storage.collect.lists import read_captions
from storage.programs import Positional, command
from storage.safe_json import parse_json
from vlbert.data.vocabulary import Vocabulary

CORPUS_VERSION = 1
_LINES_AT_ONCE = 1000  # lines that are tokenised together, on all cores
_LETTERS_AT_ONCE = 2**18  # or fewer lines, once they hold so many letters
_TOKENS_AT_ONCE = 2**24  # that are looked at together where a corpus is opened
_PART = 2**16  # bytes of a line that are read at a time
_GZIP = b"\x1f\x8b"  # what such files begin with
_WORKING = ".making-"  # begins the name of what a run of ours writes in, until it is whole


class TextCorpus:
    """A tokenised corpus: lines of token ids in one memory-mapped file, shared by all workers.

    A folder with tokens.u16 (uint16, little-endian, all lines one after the other), offsets.i64 (int64, little-endian,
    [lines + 1]) and corpus.json (version, hash of the vocabulary, lines, tokens).
    """

    def __init__(self, folder: str | Path, vocabulary: Vocabulary):
        folder = Path(folder)
        metadata = _read_metadata(folder)
        if metadata is None:
            raise ValueError(
                f"{folder} holds no corpus.json that describes a corpus; make it with `vlbert corpus {folder} ...`"
            )
        if metadata["version"] != CORPUS_VERSION or metadata["vocabulary"] != vocabulary.hash:
            raise ValueError(
                f"{folder} was made with version {metadata['version']} and vocabulary {metadata['vocabulary']}, this "
                f"run has {CORPUS_VERSION} and {vocabulary.hash}; tokenise it again with `vlbert corpus`"
            )
        torn = _torn(folder, metadata)
        if torn:
            raise ValueError(f"{torn}; tokenise it again with `vlbert corpus`")
        self.hash = hashlib.sha256((folder / "corpus.json").read_bytes()).hexdigest()
        # As plain arrays: cutting a slice from a memmap takes longer than copying it.
        self.offsets = np.asarray(np.memmap(folder / "offsets.i64", dtype="<i8", mode="r"))
        self.tokens = np.asarray(np.memmap(folder / "tokens.u16", dtype="<u2", mode="r"))
        again = "; tokenise it again with `vlbert corpus`"
        backwards = np.flatnonzero(self.offsets[1:] <= self.offsets[:-1])
        if len(backwards):
            raise ValueError(f"{folder / 'offsets.i64'} is damaged: line {backwards[0]} ends before it begins{again}")
        # Another id would be an index beyond the word table, deep in a step.
        for start in range(0, len(self.tokens), _TOKENS_AT_ONCE):
            largest = int(self.tokens[start : start + _TOKENS_AT_ONCE].max())
            if largest >= len(vocabulary):
                raise ValueError(
                    f"{folder / 'tokens.u16'} is damaged: it holds token {largest}, and the vocabulary has "
                    f"{len(vocabulary)}{again}"
                )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def passages(self, lines: np.ndarray, length: int) -> np.ndarray:
        """int64 [lines, length]: each of `lines`, and as many behind it as fill `length` tokens, round the end.

        All are shorter where the whole corpus is: no line is taken twice.
        """
        length = min(length, len(self.tokens))
        starts = self.offsets[:-1][lines]  # the last offset begins no line
        windows = np.lib.stride_tricks.sliding_window_view(self.tokens, length)
        over = starts >= len(windows)  # those that go on at the corpus' beginning
        found = windows[np.where(over, 0, starts)].astype(np.int64)
        found[over] = self.tokens[(starts[over, None] + np.arange(length)) % len(self.tokens)]
        return found


def _read_metadata(folder: Path) -> dict | None:
    """What corpus.json says; None where it is not there, or nothing that encode_corpus writes."""
    try:
        metadata = parse_json((folder / "corpus.json").read_bytes(), str(folder / "corpus.json"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    kinds = {"version": int, "vocabulary": str, "lines": int, "tokens": int}
    if all(isinstance(metadata.get(name), kind) for name, kind in kinds.items()):
        return metadata
    return None


def _torn(folder: Path, metadata: dict) -> str | None:
    """What is wrong with the files beside a corpus.json; None where they are as it says."""
    for name, size in (("offsets.i64", 8 * (metadata["lines"] + 1)), ("tokens.u16", 2 * metadata["tokens"])):
        file = folder / name
        found = file.stat().st_size if file.is_file() else 0
        if found != size:
            return f"{file} is torn or gone: it has {found} bytes, and {size} by corpus.json"
    first, last = np.memmap(folder / "offsets.i64", dtype="<i8", mode="r")[[0, -1]].tolist()
    if (first, last) != (0, metadata["tokens"]):
        return (
            f"{folder / 'offsets.i64'} is damaged: it goes from {first} to {last}, not from 0 to {metadata['tokens']}"
        )
    return None


def encode_corpus(
    parts: Iterable[tuple[str, bool]], vocabulary: Vocabulary, folder: Path, made_of: dict | None = None
) -> dict:
    """Tokenise the parts of lines, each with whether its line ends there, into `folder` (see TextCorpus).

    Empty lines are left out. Returns what corpus.json says. Until all is there the folder stays as it was, and a corpus
    that a training has mapped is replaced, never changed. One process at a time may write there (see make_corpus).
    """
    if len(vocabulary) > 2**16:
        raise ValueError(f"the vocabulary has {len(vocabulary)} tokens; the corpus format holds ids up to 65535")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=_WORKING, dir=folder) as name:
        working = Path(name)
        with open(working / "tokens.u16", "wb") as tokens, open(working / "offsets.i64", "wb") as offsets:
            lines, count = _write_tokens(parts, vocabulary, tokens, offsets)
        if not lines:
            raise ValueError(f"{folder}: the corpus has no line with a word in it")
        metadata = {
            "version": CORPUS_VERSION,
            "vocabulary": vocabulary.hash,
            "lines": lines,
            "tokens": count,
            "made_of": made_of,
        }
        (working / "vocab.txt").write_text(vocabulary.text(), encoding="utf-8")
        (working / "corpus.json").write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")
        (folder / "corpus.json").unlink(missing_ok=True)  # it comes back last, and says that all is there
        for file in ("tokens.u16", "offsets.i64", "vocab.txt", "corpus.json"):
            with open(working / file, "rb") as written:
                os.fsync(written.fileno())
            os.replace(working / file, folder / file)
    return metadata


def _write_tokens(
    parts: Iterable[tuple[str, bool]], vocabulary: Vocabulary, tokens: BinaryIO, offsets: BinaryIO
) -> tuple[int, int]:
    """Write the two files of a corpus, a portion at a time; how many lines and tokens there are."""
    lines, count, begun = 0, 0, 0  # begun: where in the tokens the present line begins
    np.zeros(1, "<i8").tofile(offsets)
    for portion in _portions(parts):
        found = vocabulary.encode_many([text for text, _ in portion])
        ends = []
        for (_, line_ends), ids in zip(portion, found, strict=True):
            count += len(ids)
            if line_ends and count > begun:
                ends.append(count)
                begun = count
        np.fromiter(itertools.chain.from_iterable(found), "<u2").tofile(tokens)
        np.array(ends, "<i8").tofile(offsets)
        lines += len(ends)
    return lines, count


def _portions(parts: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    portion, letters = [], 0
    for part in parts:
        portion.append(part)
        letters += len(part[0])
        if len(portion) == _LINES_AT_ONCE or letters >= _LETTERS_AT_ONCE:
            yield portion
            portion, letters = [], 0
    if portion:
        yield portion


def make_corpus(
    folder: Path, files: Sequence[Path], vocabulary: Path | None, size: int, captions: Sequence[Path]
) -> tuple[dict, bool]:
    """The corpus of `files` in `folder`, with its vocab.txt: the one given, or one of at most `size` tokens built here.

    It is built from the lines and from the captions of the lists `captions`. Returns (what corpus.json says, whether it
    was made now): a folder that was made from the same bytes is left as it is. ValueError says what is wrong with an
    input or the folder, and that another process writes there.
    """
    inputs = [*files, *captions, *([vocabulary] if vocabulary else [])]
    for file in inputs:
        if not file.exists():
            raise ValueError(f"there is no file {file}; see how its name is written")
        if not file.is_file():
            raise ValueError(f"{file} is a folder, a pipe or a device; name files, which are read more than once")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder, new or with an older corpus, before the files to read")
    metadata, made_of = _read_whole(folder), _made_of(files, vocabulary, size, captions)
    if metadata and metadata.get("made_of") == made_of:
        return metadata, False
    if not any(text.strip() for text, _ in _parts(files)):
        raise ValueError(f"there is no line with a word in {', '.join(map(str, files))}; name files with text")

    def texts() -> Iterator[str]:
        read = (row.caption for file in captions for row in read_captions(file))
        return itertools.chain(read, (text for text, _ in _parts(files)))

    given = Vocabulary.read(vocabulary) if vocabulary else None
    with _alone(folder):
        return encode_corpus(_parts(files), given or Vocabulary.build(texts, size), folder, made_of), True


def find_corpus(
    folder: Path, files: Sequence[Path], vocabulary: Path | None, size: int, captions: Sequence[Path]
) -> dict | None:
    """What corpus.json says where make_corpus would leave the folder as it is; None where it would make a corpus, and
    where an input is not there."""
    inputs = [*files, *captions, *([vocabulary] if vocabulary else [])]
    try:
        if not all(file.is_file() for file in inputs):  # a pipe or a device: it may never end, or wait for ever
            return None
        metadata = _read_whole(folder)
        same = metadata is not None and metadata.get("made_of") == _made_of(files, vocabulary, size, captions)
    except (OSError, ValueError):
        return None
    return metadata if same else None


def _read_whole(folder: Path) -> dict | None:
    """What corpus.json says of a corpus of this version whose files are as it says; None where there is none."""
    metadata = _read_metadata(folder)
    whole = metadata is not None and metadata["version"] == CORPUS_VERSION and not _torn(folder, metadata)
    return metadata if whole else None


def _made_of(files: Sequence[Path], vocabulary: Path | None, size: int, captions: Sequence[Path]) -> dict:
    """What corpus.json says of the inputs."""
    inputs = [*files, *captions, *([vocabulary] if vocabulary else [])]
    return {"files": [_hash(file) for file in inputs], "size": None if vocabulary else size}


def describe_corpus(folder: Path, metadata: dict, made: str = "as it was: made of the same files") -> str:
    """The line that says what is in the folder."""
    return f"{folder}: {metadata['lines']} lines, {metadata['tokens']} tokens, {made}"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Make the folder, and be the only process that writes there; ValueError where another one is."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is making a corpus in {folder}; wait for its end and start this again, or name "
                "another folder"
            ) from None
        for left in folder.glob(f"{_WORKING}*"):  # by a run that was killed
            shutil.rmtree(left)
        yield


def _hash(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _parts(files: Iterable[Path], at_once: int = _PART) -> Iterator[tuple[str, bool]]:
    """The lines of the files in parts of about `at_once` bytes at most, each with whether its line ends there.

    A long line is cut between words, so that its parts have the same tokens as the whole. ValueError names file and
    line of what is not UTF-8, and a gzip file that is damaged.
    """
    for file in files:
        number, kept, line_ends = 1, b"", True
        with _opened(file) as stream:
            try:
                while read := stream.readline(at_once):
                    line_ends = read.endswith(b"\n")
                    part, kept = (kept + read, b"") if line_ends else _cut(kept + read)
                    yield _decoded(part, file, number), line_ends  # a byte order mark is a letter that BERT leaves out
                    number += line_ends
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(
                    f"{file}:{number}: the gzip file is cut short or damaged here ({error}); fetch it again"
                ) from error
        if not line_ends:
            yield _decoded(kept, file, number), True


def _decoded(part: bytes, file: Path, number: int) -> str:
    try:
        return part.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file}:{number} is not UTF-8 ({error.reason}: {part[error.start]:#04x}); convert it"
        ) from error


def _cut(part: bytes) -> tuple[bytes, bytes]:
    """The beginning of a line up to its last blank, and the rest; up to its last letter where there is no blank."""
    cut = max(part.rfind(b" "), part.rfind(b"\t"))
    if cut <= 0:
        cut = len(part) - 1
        while cut > 0 and part[cut] & 0xC0 == 0x80:  # goes on with a letter that began before
            cut -= 1
    return (part[:cut], part[cut:]) if cut > 0 else (part, b"")


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked where its first ones say gzip."""
    with open(file, "rb") as stream:
        packed = stream.read(len(_GZIP)) == _GZIP
        stream.seek(0)
        if packed:
            with gzip.GzipFile(fileobj=stream) as unpacked:
                yield unpacked
        else:
            yield stream


def write_corpus(
    out: Positional[Path],
    files: Positional[tuple[Path, ...]],
    vocabulary: Path | None = None,
    vocabulary_size: int | None = None,
    captions: tuple[Path, ...] = (),
) -> None:
    """Tokenise a text-only corpus into one flat file of token ids.

    vlbert corpus OUT FILES... --vocabulary vocab.txt

    Args:
        out: folder to write, vocab.txt included
        files: text files, plain or gzip, one document a line
        vocabulary: vocab.txt to use, such as BERT's; give this or vocabulary_size
        vocabulary_size: build a vocabulary of at most so many tokens
        captions: caption lists to build it from, too
    """
    if (vocabulary is None) == (vocabulary_size is None):
        raise ValueError("give either --vocabulary or --vocabulary_size")
    start = time.perf_counter()
    metadata, made = make_corpus(out, files, vocabulary, vocabulary_size or 0, captions)
    speed = metadata["tokens"] / (time.perf_counter() - start)
    print(describe_corpus(out, metadata, *([f"{speed:,.0f} tokens/s"] if made else [])))


main = command("vlbert corpus", write_corpus)
