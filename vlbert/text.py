"""Words: the WordPiece vocabulary, and the text-only corpus as one flat file of token ids.

python -m vlbert.text OUT --vocabulary vocab.txt FILES...     tokenise a text-only corpus, one document a line
"""

import argparse
import array
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from storage.download import read_captions

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CORPUS_VERSION = 1
_LINES_AT_ONCE = 1000  # lines that are tokenised together, on all cores


class Vocabulary:
    """A WordPiece vocabulary: BERT's own, or one built from captions.

    pieces        list[str]    the piece of each id
    continues     bool [V]     the piece goes on with the word before it ("##ing")
    """

    def __init__(self, pieces: list[str], where: str = "the vocabulary"):
        from tokenizers import BertWordPieceTokenizer

        missing = [special for special in SPECIALS if special not in pieces]
        if missing:
            raise ValueError(f"{where} lacks {', '.join(missing)}; it must be a BERT vocab.txt, one piece a line")
        if len(set(pieces)) < len(pieces):
            raise ValueError(f"{where} holds a piece twice: {next(p for p in pieces if pieces.count(p) > 1)!r}")
        self.pieces = pieces
        self.ids = {piece: i for i, piece in enumerate(pieces)}
        self.pad, self.unknown, self.cls, self.sep, self.mask = (self.ids[special] for special in SPECIALS)
        self.continues = np.array([piece.startswith("##") for piece in pieces])
        self.ordinary = np.array([i for i, piece in enumerate(pieces) if piece not in SPECIALS])
        self._tokenizer = BertWordPieceTokenizer(vocab=self.ids, lowercase=True)

    @classmethod
    def read(cls, file: str | Path) -> "Vocabulary":
        """From a vocab.txt: one piece a line, the line number is the id."""
        try:
            text = Path(file).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ValueError(f"there is no vocabulary {file}; name BERT's vocab.txt, one piece a line") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is no vocab.txt: it is not UTF-8 ({error})") from error
        return cls(text.splitlines(), where=str(file))

    @classmethod
    def build(cls, texts: Callable[[], Iterable[str]], size: int) -> "Vocabulary":
        """At most `size` pieces, learned from what two calls of `texts` give; the same texts give the same vocabulary.

        ValueError where there is no word in them, or `size` has no room for their letters.
        """
        from tokenizers import BertWordPieceTokenizer

        trainer = BertWordPieceTokenizer(lowercase=True)
        alphabet = sorted({letter for text in texts() for letter in trainer.normalize(text) if not letter.isspace()})
        if not alphabet:
            raise ValueError("no vocabulary can be built: there is no word in the texts; name a vocab.txt")
        if len(SPECIALS) + 2 * len(alphabet) > size:
            raise ValueError(
                f"the texts hold {len(alphabet)} different letters, which take {len(SPECIALS) + 2 * len(alphabet)} "
                f"pieces before the first word, and the vocabulary is to have {size} at most; give it more"
            )
        # The trainer numbers letters in the order of a hash map, and breaks ties by number: with the letters given
        # first, in order, the same texts give the same pieces.
        letters = [*alphabet, *(f"##{letter}" for letter in alphabet)]
        trainer.train_from_iterator(
            texts(), vocab_size=size, min_frequency=2, special_tokens=[*SPECIALS, *letters], show_progress=False
        )
        ids = trainer.get_vocab()
        return cls(sorted(ids, key=ids.get))

    def text(self) -> str:
        """What vocab.txt holds."""
        return "".join(f"{piece}\n" for piece in self.pieces)

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.text().encode()).hexdigest()[:12]

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: str) -> np.ndarray:
        """int64 [t]: the word pieces of `text`, without special tokens."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        """The pieces of each text, on all cores."""
        return [found.ids for found in self._tokenizer.encode_batch(texts, add_special_tokens=False)]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text that the pieces spell, special tokens and all."""
        return " ".join(self.pieces[i] for i in tokens).replace(" ##", "")

    def word_of(self, tokens: np.ndarray) -> np.ndarray:
        """int64 [t]: the number of the whole word that each piece belongs to; -1 in a word whose start is cut off."""
        return np.cumsum(~self.continues[tokens]) - 1


class TextCorpus:
    """A tokenised corpus: lines of token ids in one memory-mapped file, shared by all workers.

    A folder with tokens.u16 (uint16, little-endian, all lines one after the other), offsets.i64 (int64, little-endian,
    [lines + 1]) and corpus.json (version, hash of the vocabulary, lines, tokens).
    """

    def __init__(self, folder: str | Path, vocabulary: Vocabulary):
        folder = Path(folder)
        if not (folder / "corpus.json").is_file():
            raise ValueError(
                f"{folder} holds no corpus.json; make the corpus with `python -m vlbert.text {folder} ...`"
            )
        about = json.loads((folder / "corpus.json").read_text())
        if about["version"] != CORPUS_VERSION or about["vocabulary"] != vocabulary.hash:
            raise ValueError(
                f"{folder} was made with version {about['version']} and vocabulary {about['vocabulary']}, this run has "
                f"{CORPUS_VERSION} and {vocabulary.hash}; tokenise it again with `python -m vlbert.text`"
            )
        self.hash = hashlib.sha256((folder / "corpus.json").read_bytes()).hexdigest()
        self.offsets = np.memmap(folder / "offsets.i64", dtype="<i8", mode="r", shape=(about["lines"] + 1,))
        self.tokens = np.memmap(folder / "tokens.u16", dtype="<u2", mode="r", shape=(about["tokens"],))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def passage(self, line: int, length: int) -> np.ndarray:
        """int64 [<= length]: line `line` and as many lines behind it as fill `length` pieces, round the end."""
        parts, missing = [], length
        for step in range(len(self)):
            start, end = self.offsets[[(line + step) % len(self), (line + step) % len(self) + 1]]
            parts.append(self.tokens[start : min(end, start + missing)])
            missing -= len(parts[-1])
            if not missing:
                break
        return np.concatenate(parts).astype(np.int64)


def encode_corpus(lines: Iterable[str], vocabulary: Vocabulary, folder: Path, made_of: dict | None = None) -> dict:
    """Tokenise `lines` into `folder` (see TextCorpus); empty lines are left out. Returns what corpus.json says."""
    if len(vocabulary) > 2**16:
        raise ValueError(f"the vocabulary has {len(vocabulary)} pieces; the corpus format holds ids up to 65535")
    folder.mkdir(parents=True, exist_ok=True)
    lines, offsets = iter(lines), array.array("q", [0])
    with open(folder / "tokens.u16", "wb") as file:
        while portion := list(itertools.islice(lines, _LINES_AT_ONCE)):
            for ids in vocabulary.encode_many(portion):
                if ids:
                    np.array(ids, dtype="<u2").tofile(file)
                    offsets.append(offsets[-1] + len(ids))
    if len(offsets) == 1:
        raise ValueError(f"{folder}: the corpus has no line with a word in it")
    np.array(offsets, dtype="<i8").tofile(folder / "offsets.i64")
    about = {
        "version": CORPUS_VERSION,
        "vocabulary": vocabulary.hash,
        "lines": len(offsets) - 1,
        "tokens": offsets[-1],
        "made_of": made_of,
    }
    (folder / "corpus.json").write_text(json.dumps(about, indent=1) + "\n")
    return about


def make_corpus(
    folder: Path, files: Sequence[Path], vocabulary: Path | None, size: int, captions: Sequence[Path]
) -> tuple[dict, bool]:
    """The corpus of `files` in `folder`, with its vocab.txt: the one given, or one of at most `size` pieces built here.

    It is built from the lines and from the captions of the lists `captions`. Returns (what corpus.json says, whether it
    was made now): a folder that was made from the same bytes is left as it is.
    """
    inputs = [*files, *captions, *([vocabulary] if vocabulary else [])]
    made_of = {"files": [_hash(file) for file in inputs], "size": None if vocabulary else size}
    recorded = folder / "corpus.json"
    if recorded.is_file() and json.loads(recorded.read_text()).get("made_of") == made_of:
        return json.loads(recorded.read_text()), False
    folder.mkdir(parents=True, exist_ok=True)
    recorded.unlink(missing_ok=True)  # it comes back last, and says that all is there
    if vocabulary:
        words = Vocabulary.read(vocabulary)
    else:

        def texts() -> Iterator[str]:
            return itertools.chain((row.caption for file in captions for row in read_captions(file)), _lines(files))

        words = Vocabulary.build(texts, size)
    (folder / "vocab.txt").write_text(words.text(), encoding="utf-8")
    return encode_corpus(_lines(files), words, folder, made_of), True


def _hash(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _lines(files: Iterable[Path]) -> Iterator[str]:
    for file in files:
        with open(file, encoding="utf-8") as lines:
            try:
                yield from lines
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not UTF-8 ({error}); convert it") from error


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m vlbert.text", description="Tokenise a text-only corpus.")
    parser.add_argument("out", type=Path, help="folder to write, vocab.txt included")
    parser.add_argument("files", type=Path, nargs="+", help="text files, one document a line")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--vocabulary", type=Path, help="vocab.txt to use, such as BERT's")
    source.add_argument("--build", type=int, metavar="SIZE", help="build a vocabulary of at most SIZE pieces")
    parser.add_argument("--captions", type=Path, nargs="*", default=[], help="caption lists (TSV) to build it from too")
    arguments = parser.parse_args()
    try:
        about, made = make_corpus(
            arguments.out, arguments.files, arguments.vocabulary, arguments.build, arguments.captions
        )
    except (ValueError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
    told = "" if made else ", as it was: made of the same files"
    print(f"{arguments.out}: {about['lines']} lines, {about['tokens']} tokens{told}")


if __name__ == "__main__":
    main()
