"""Text-only corpora. `vlbert corpus` tokenises UTF-8 files of any size into one flat file of token ids."""

import contextlib
import itertools
import json
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from storage.collect.lists import read_captions
from storage.digests import sha256_of
from storage.programs import Command, Positional
from storage.safe_json import parse_json
from storage.signatures import START_BYTES, check_start
from vlbert.data.vocabulary import Vocabulary

CORPUS_VERSION = 1
_FILES = ("tokens.u16", "offsets.i64", "vocab.txt", "corpus.json")  # corpus.json is written last
_LINES_AT_ONCE = 1000  # lines per call of the tokenizer, which uses all cores


class TextCorpus:
    """A tokenised corpus: lines of token ids in one memory-mapped file that all workers share.

    Its folder has tokens.u16 (the token ids of all lines in sequence, little-endian uint16), offsets.i64 (start of each
    line, [lines + 1], little-endian int64), corpus.json (version, vocabulary's hash, counts) and vocab.txt.
    """

    def __init__(self, folder: str | Path, vocabulary: Vocabulary):
        folder = Path(folder)
        try:
            metadata, self.tokens, self.offsets = _open_corpus(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder} has no complete corpus ({error}); run `vlbert corpus {folder} ...`") from error
        origin = metadata.get("version"), metadata.get("vocabulary")
        if origin != (CORPUS_VERSION, vocabulary.hash):
            raise ValueError(
                f"{folder} was made with version and vocabulary {origin}, but this run has "
                f"{CORPUS_VERSION} and {vocabulary.hash}; tokenise it again with `vlbert corpus`"
            )
        self.hash = sha256_of(folder / "corpus.json")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def passages(self, lines: np.ndarray, length: int) -> np.ndarray:
        """Return passages of `length` token ids, one starting at each of `lines`, int64 [len(lines), length].

        A passage may continue into the next lines, and from the last line into the first. If the corpus has fewer than
        `length` tokens, passages are as long as the corpus.
        """
        length = min(length, len(self.tokens))
        starts = self.offsets[:-1][lines]  # without the last offset, the end of the corpus
        windows = np.lib.stride_tricks.sliding_window_view(self.tokens, length)
        wrapping = starts >= len(windows)  # passages that continue at the beginning of the corpus
        passages = windows[np.where(wrapping, 0, starts)].astype(np.int64)
        passages[wrapping] = self.tokens[(starts[wrapping, None] + np.arange(length)) % len(self.tokens)]
        return passages


def _open_corpus(folder: Path) -> tuple[dict, np.ndarray, np.ndarray]:
    """Return the content of corpus.json, the tokens and the offsets. Raises ValueError if a file is truncated."""
    file = folder / "corpus.json"
    metadata = parse_json(file.read_bytes(), str(file))
    arrays = []
    for name, kind, count in (("tokens.u16", "<u2", metadata["tokens"]), ("offsets.i64", "<i8", metadata["lines"] + 1)):
        mapped = np.memmap(folder / name, dtype=kind, mode="r")
        if len(mapped) != count:
            raise ValueError(f"{name} has {len(mapped)} numbers, but {count} according to corpus.json")
        arrays.append(np.asarray(mapped))  # slicing a memmap takes longer than copying the slice
    tokens, offsets = arrays
    return metadata, tokens, offsets


def encode_corpus(texts: Iterable[str], vocabulary: Vocabulary, folder: Path, made_of: dict | None = None) -> dict:
    """Tokenise texts into `folder` (see TextCorpus), one line per non-empty text. Return the content of corpus.json.

    The folder changes only when all files are ready. A training run that has mapped the old files can still read them.
    `made_of` is stored in corpus.json. Raises ValueError if the texts have no words.
    """
    if len(vocabulary) > 2**16:
        raise ValueError(f"the vocabulary has {len(vocabulary)} tokens; the corpus format holds ids up to 65535")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as making:
        new = [Path(making, name) for name in _FILES]
        lengths = _write_tokens(texts, vocabulary, new[0])
        if not lengths:
            raise ValueError(f"there is no line with a word for {folder}; name files that have text")
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
            os.replace(file, folder / file.name)  # not overwritten: a training run may have mapped the old file
    return metadata


def _write_tokens(texts: Iterable[str], vocabulary: Vocabulary, file: Path) -> "array[int]":
    """Write the token ids of all texts to a file, and return the number of tokens of each non-empty text."""
    lengths, texts = array("q"), iter(texts)
    with open(file, "wb") as out:
        while portion := list(itertools.islice(texts, _LINES_AT_ONCE)):
            tokens = [ids for ids in vocabulary.encode_many(portion) if ids]
            np.fromiter(itertools.chain.from_iterable(tokens), "<u2").tofile(out)
            lengths.extend(map(len, tokens))
    return lengths


def make_corpus(
    folder: Path, files: Sequence[Path], vocabulary: Path | None, size: int, captions: Sequence[Path]
) -> dict:
    """Tokenise text files into the corpus `folder`, and return the content of corpus.json.

    If the folder was made from the same files, it is not changed. Raises ValueError if a file is missing or not valid.

    Args:
        vocabulary: vocab.txt to use; None builds one of at most `size` tokens from `files` and `captions`.
        captions: caption lists, used only to build the vocabulary.
    """
    inputs = [*files, *captions, *([vocabulary] if vocabulary else [])]
    for file in inputs:
        if not file.is_file():
            raise ValueError(f"there is no file {file}; name existing text files")
    made_of = {"files": [sha256_of(file) for file in inputs], "size": None if vocabulary else size}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        metadata, *_ = _open_corpus(folder)
        if (metadata["version"], metadata["made_of"]) == (CORPUS_VERSION, made_of):
            return metadata

    def texts() -> Iterator[str]:
        from_captions = (row.caption for file in captions for row in read_captions(file))
        return itertools.chain(from_captions, _read_lines(files))

    vocabulary_used = Vocabulary.read(vocabulary) if vocabulary else Vocabulary.build(texts, size)
    return encode_corpus(_read_lines(files), vocabulary_used, folder, made_of)


def _read_lines(files: Iterable[Path]) -> Iterator[str]:
    """Yield the lines of the files. Raises ValueError, with file and line, if a line is not UTF-8."""
    for file in files:
        with open(file, "rb") as stream:
            check_start(file, stream.peek(START_BYTES))
            for number, line in enumerate(stream, 1):
                try:
                    text = line.decode()  # BERT's tokenizer ignores a byte order mark
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
        out: folder to write the corpus and its vocab.txt to
        files: text files in UTF-8, one document per line
        vocabulary: vocab.txt to use, such as BERT's; give this or vocabulary_size
        vocabulary_size: build a vocabulary of at most this many tokens
        captions: caption lists to build the vocabulary from, in addition to files
    """
    if (vocabulary is None) == (vocabulary_size is None):
        raise ValueError("set either --vocabulary or --vocabulary_size")
    metadata = make_corpus(out, files, vocabulary, vocabulary_size or 0, captions)
    print(f"{out}: {metadata['lines']} lines, {metadata['tokens']} tokens")


main = Command("vlbert corpus", write_corpus)
