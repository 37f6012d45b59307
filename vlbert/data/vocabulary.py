"""WordPiece vocabularies."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from vlbert.datasets.files import read_text

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class Vocabulary:
    """A WordPiece vocabulary: BERT's own, or one built from captions.

    Attributes:
        tokens: all tokens, in the order of their ids.
        ids: the id of each token.
        continues: bool [V], True for tokens that continue a word ("##ing").
        ordinary: int64, ids of the tokens that are not special.
    """

    def __init__(self, tokens: list[str], source: str = "the vocabulary"):
        from tokenizers import BertWordPieceTokenizer

        missing = [special for special in SPECIALS if special not in tokens]
        if missing:
            raise ValueError(f"{source} lacks {', '.join(missing)}; it must be a BERT vocab.txt, one token per line")
        if len(set(tokens)) < len(tokens):
            raise ValueError(f"{source} has a token twice: {next(p for p in tokens if tokens.count(p) > 1)!r}")
        cased = next((token for token in tokens if token[:1] != "[" and token != token.lower()), None)
        if cased:
            raise ValueError(f"{source} is a cased BERT's: {cased!r}; captions are lower-cased, so use an uncased one")
        self.tokens = tokens
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.pad, self.unknown, self.cls, self.sep, self.mask = (self.ids[special] for special in SPECIALS)
        self.continues = np.array([token.startswith("##") for token in tokens])
        self.ordinary = np.array([i for i, token in enumerate(tokens) if token not in SPECIALS])
        self.tokenizer = BertWordPieceTokenizer(vocab=self.ids, lowercase=True)

    @classmethod
    def read(cls, file: str | Path) -> "Vocabulary":
        """Read a vocab.txt, which has one token per line. A token's id is its line number, counted from 0."""
        return cls(read_text(Path(file), "the vocabulary (BERT's vocab.txt)").splitlines(), source=str(file))

    @classmethod
    def build(cls, texts: Callable[[], Iterable[str]], size: int) -> "Vocabulary":
        """Build a vocabulary of at most `size` tokens from texts. The same texts give the same vocabulary.

        `texts` is called twice. Raises ValueError if the texts have no words, or too many different letters for `size`.
        """
        from tokenizers import BertWordPieceTokenizer

        trainer = BertWordPieceTokenizer(lowercase=True)
        alphabet = sorted({letter for text in texts() for letter in trainer.normalize(text) if not letter.isspace()})
        if not alphabet:
            raise ValueError("no vocabulary can be built, because the texts have no words; name a vocab.txt")
        if len(SPECIALS) + 2 * len(alphabet) > size:
            raise ValueError(
                f"the texts have {len(alphabet)} different letters, which take {len(SPECIALS) + 2 * len(alphabet)} "
                f"tokens, but the vocabulary may have only {size}; make it larger"
            )
        # The trainer numbers letters in the order of a hash map and breaks ties by number. With the letters given
        # first, in order, the same texts give the same tokens.
        letters = [*alphabet, *(f"##{letter}" for letter in alphabet)]
        trainer.train_from_iterator(
            texts(), vocab_size=size, min_frequency=2, special_tokens=[*SPECIALS, *letters], show_progress=False
        )
        ids = trainer.get_vocab()
        return cls(sorted(ids, key=ids.__getitem__))

    def text(self) -> str:
        """Return this vocabulary as the content of a vocab.txt."""
        return "".join(f"{token}\n" for token in self.tokens)

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.text().encode()).hexdigest()[:12]

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text, int64 [t], without special tokens. Raises ValueError if it is not Unicode."""
        try:
            return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)
        except TypeError as error:  # half of a surrogate pair, from a command line that is not UTF-8
            raise ValueError(f"{text!r} is not Unicode text; use UTF-8") from error

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text, without special tokens. Uses all cores."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of token ids, including special tokens such as "[CLS]"."""
        return " ".join(self.tokens[i] for i in tokens).replace(" ##", "")
