"""The WordPiece vocabulary: BERT's own, or one built from captions."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class Vocabulary:
    """A WordPiece vocabulary: BERT's own, or one built from captions.

    tokens        list[str]    the token of each id
    continues     bool [V]     the token goes on with the word before it ("##ing")
    tokenizer                  splits texts into them
    """

    def __init__(self, tokens: list[str], where: str = "the vocabulary"):
        from tokenizers import BertWordPieceTokenizer

        missing = [special for special in SPECIALS if special not in tokens]
        if missing:
            raise ValueError(f"{where} lacks {', '.join(missing)}; it must be a BERT vocab.txt, one token a line")
        if len(set(tokens)) < len(tokens):
            raise ValueError(f"{where} holds a token twice: {next(p for p in tokens if tokens.count(p) > 1)!r}")
        self.tokens = tokens
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.pad, self.unknown, self.cls, self.sep, self.mask = (self.ids[special] for special in SPECIALS)
        self.continues = np.array([token.startswith("##") for token in tokens])
        self.ordinary = np.array([i for i, token in enumerate(tokens) if token not in SPECIALS])
        self.tokenizer = BertWordPieceTokenizer(vocab=self.ids, lowercase=True)

    @classmethod
    def read(cls, file: str | Path) -> "Vocabulary":
        """From a vocab.txt: one token a line, the line number is the id."""
        try:
            text = Path(file).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ValueError(f"there is no vocabulary {file}; name BERT's vocab.txt, one token a line") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is no vocab.txt: it is not UTF-8 ({error})") from error
        return cls(text.splitlines(), where=str(file))

    @classmethod
    def build(cls, texts: Callable[[], Iterable[str]], size: int) -> "Vocabulary":
        """At most `size` tokens, learned from what two calls of `texts` give; the same texts give the same vocabulary.

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
                f"tokens before the first word, and the vocabulary is to have {size} at most; give it more"
            )
        # The trainer numbers letters in the order of a hash map, and breaks ties by number: with the letters given
        # first, in order, the same texts give the same tokens.
        letters = [*alphabet, *(f"##{letter}" for letter in alphabet)]
        trainer.train_from_iterator(
            texts(), vocab_size=size, min_frequency=2, special_tokens=[*SPECIALS, *letters], show_progress=False
        )
        ids = trainer.get_vocab()
        return cls(sorted(ids, key=ids.get))

    def text(self) -> str:
        """What vocab.txt holds."""
        return "".join(f"{token}\n" for token in self.tokens)

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.text().encode()).hexdigest()[:12]

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> np.ndarray:
        """int64 [t]: the tokens of `text`, without special tokens. ValueError where it is no Unicode text."""
        try:
            return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)
        except TypeError as error:  # half of a surrogate pair, as a command line that is not UTF-8 has it
            raise ValueError(f"{text!r} is no Unicode text") from error

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        """The tokens of each text, on all cores."""
        return [found.ids for found in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text that the tokens spell, special tokens and all."""
        return " ".join(self.tokens[i] for i in tokens).replace(" ##", "")
