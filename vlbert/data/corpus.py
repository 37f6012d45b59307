"""Tokenise a text-only corpus into one flat file of token ids: `vlbert corpus`. Its files are UTF-8, of any size."""

import contextlib
import hashlib
import itertools
import json
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from storage.collect.lists import read_captions
from storage.programs import Command, Positional
from storage.safe_json import parse_json
from vlbert.data.vocabulary import Vocabulary

CORPUS_VERSION = 1
_FILES = ("tokens.u16", "offsets.i64", "vocab.txt", "corpus.json")  # corpus.json is last, and says that all is there
_LINES_AT_ONCE = 1000  # lines that are tokenised together, on all cores


class TextCorpus:
    """A tokenised corpus: lines of token ids in one memory-mapped file, shared by all workers.

    A folder with tokens.u16 (uint16, little-endian, all lines one after the other), offsets.i64 (int64, little-endian,
    [lines + 1]) and corpus.json (version, hash of the vocabulary, lines, tokens).
    """

    def __init__(self, folder: str | Path, vocabulary: Vocabulary):
        folder = Path(folder)
        try:
            metadata, self.tokens, self.offsets = _open(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{folder} holds no whole corpus ({error}); make it with `vlbert corpus {folder} ...`"
            ) from error
        made_with = metadata.get("version"), metadata.get("vocabulary")
        if made_with != (CORPUS_VERSION, vocabulary.hash):
            raise ValueError(
                f"{folder} was made with version and vocabulary {made_with}, this run has "
                f"{CORPUS_VERSION} and {vocabulary.hash}; tokenise it again with `vlbert corpus`"
            )
        self.hash = hashlib.sha256((folder / "corpus.json").read_bytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def passages(self, lines: np.ndarray, length: int) -> np.ndarray:
        """Return each of `lines`, and as many behind it as fill `length` tokens, round the end: int64 [lines, length].

        All are shorter where the whole corpus is: no line is taken twice.
        """
        length = min(length, len(self.tokens))
        starts = self.offsets[:-1][lines]  # the last offset begins no line
        windows = np.lib.stride_tricks.sliding_window_view(self.tokens, length)
        over = starts >= len(windows)  # those that go on at the corpus' beginning
        found = windows[np.where(over, 0, starts)].astype(np.int64)
        found[over] = self.tokens[(starts[over, None] + np.arange(length)) % len(self.tokens)]
        return found


def _open(folder: Path) -> tuple[dict, np.ndarray, np.ndarray]:
    """Return what corpus.json says, and the mapped tokens and offsets. Raises an error if a file is gone or torn."""
    file = folder / "corpus.json"
    metadata = parse_json(file.read_bytes(), str(file))
    arrays = []
    for name, kind, count in (("tokens.u16", "<u2", metadata["tokens"]), ("offsets.i64", "<i8", metadata["lines"] + 1)):
        mapped = np.memmap(folder / name, dtype=kind, mode="r")
        if len(mapped) != count:
            raise ValueError(f"{name} has {len(mapped)} numbers, and {count} by corpus.json")
        arrays.append(np.asarray(mapped))  # a plain array: cutting a slice from a memmap takes longer than copying it
    return metadata, *arrays


def encode_corpus(texts: Iterable[str], vocabulary: Vocabulary, folder: Path, made_of: dict | None = None) -> dict:
    """Tokenise texts into `folder` (see TextCorpus), one line each, without empty ones; return what corpus.json says.

    Until all is there the folder stays as it was. A corpus that a training has mapped is replaced, never changed.
    Raises ValueError if there is no word.
    """
    if len(vocabulary) > 2**16:
        raise ValueError(f"the vocabulary has {len(vocabulary)} tokens; the corpus format holds ids up to 65535")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as making:
        new = [Path(making, name) for name in _FILES]
        lengths = _write_tokens(texts, vocabulary, new[0])
        if not lengths:
            raise ValueError(f"there is no line with a word for {folder}; name files with text")
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")
        offsets.tofile(new[1])
        new[2].write_text(vocabulary.text(), encoding="utf-8")
        metadata = {"version": CORPUS_VERSION, "vocabulary": vocabulary.hash}
        metadata |= {"lines": len(lengths), "tokens": int(offsets[-1]), "made_of": made_of}
        new[3].write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")
        (folder / "corpus.json").unlink(missing_ok=True)
        for file in new:
            with open(file, "rb") as written:
                os.fsync(written.fileno())
            os.replace(file, folder / file.name)
    return metadata


def _write_tokens(texts: Iterable[str], vocabulary: Vocabulary, file: Path) -> "array[int]":
    """Write the tokens of all texts, and return how many each has that has any."""
    lengths, texts = array("q"), iter(texts)
    with open(file, "wb") as out:
        while portion := list(itertools.islice(texts, _LINES_AT_ONCE)):
            found = [ids for ids in vocabulary.encode_many(portion) if ids]
            np.fromiter(itertools.chain.from_iterable(found), "<u2").tofile(out)
            lengths.extend(map(len, found))
    return lengths


def make_corpus(
    folder: Path, files: Sequence[Path], vocabulary: Path | None, size: int, captions: Sequence[Path]
) -> dict:
    """Make the corpus of `files` in `folder`, with its vocab.txt: the one given, or one of at most `size` tokens, built
    from the lines and from the captions of the lists `captions`. Return what corpus.json says.

    A folder that was made from the same bytes is left as it is. Raises ValueError if an input is wrong.
    """
    inputs = [*files, *captions, *([vocabulary] if vocabulary else [])]
    for file in inputs:
        if not file.is_file():
            raise ValueError(f"there is no file {file}; name text files")
    made_of = {"files": [_hash(file) for file in inputs], "size": None if vocabulary else size}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        metadata, *_ = _open(folder)
        if (metadata["version"], metadata["made_of"]) == (CORPUS_VERSION, made_of):
            return metadata

    def texts() -> Iterator[str]:
        read = (row.caption for file in captions for row in read_captions(file))
        return itertools.chain(read, _lines(files))

    given = Vocabulary.read(vocabulary) if vocabulary else Vocabulary.build(texts, size)
    return encode_corpus(_lines(files), given, folder, made_of)


def _hash(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _lines(files: Iterable[Path]) -> Iterator[str]:
    """Yield the lines of the files. Raises ValueError that names file and line if one is not UTF-8."""
    for file in files:
        with open(file, "rb") as stream:
            for number, line in enumerate(stream, 1):
                try:
                    text = line.decode()  # a byte order mark is a letter that BERT leaves out
                except UnicodeDecodeError as error:
                    raise ValueError(
                        f"{file}:{number} is not UTF-8 ({error.reason}: {line[error.start]:#04x}); convert or unpack it"
                    ) from error
                yield text


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
        files: text files in UTF-8, one document a line
        vocabulary: vocab.txt to use, such as BERT's; give this or vocabulary_size
        vocabulary_size: build a vocabulary of at most so many tokens
        captions: caption lists to build it from, too
    """
    if (vocabulary is None) == (vocabulary_size is None):
        raise ValueError("give either --vocabulary or --vocabulary_size")
    metadata = make_corpus(out, files, vocabulary, vocabulary_size or 0, captions)
    print(f"{out}: {metadata['lines']} lines, {metadata['tokens']} tokens")


main = Command("vlbert corpus", write_corpus)
