"""Random masking of words and regions (paper 3.3)."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from storage.settings import check_choices
from vlbert.data.vocabulary import Vocabulary


@dataclass(frozen=True)
class WordMasking:
    """Settings for masking words. The defaults follow the authors' code; the paper uses masked=1 and random=0."""

    probability: float = 0.15  # probability that a word is chosen and gets a label
    masked: float = 0.8  # share of the chosen words that become [MASK]
    random: float = 0.1  # share of the chosen words that become random tokens; the rest is unchanged
    whole_words: bool = True  # choose whole words instead of single tokens
    random_from: Literal["ordinary", "all"] = "ordinary"  # random tokens; all: special tokens, too (ViLBERT's code)

    def __post_init__(self):
        check_choices(self)
        _check_shares(self, self.probability, self.masked, self.random)


@dataclass(frozen=True)
class RegionMasking:
    """Settings for masking regions. The defaults follow the authors' code; the paper uses masked=1."""

    probability: float = 0.15  # probability that a region is chosen and gets a label
    masked: float = 0.9  # share of the chosen regions that are masked; the rest stays visible

    def __post_init__(self):
        _check_shares(self, self.probability, self.masked)


def _check_shares(rule: WordMasking | RegionMasking, probability: float, *shares: float) -> None:
    if not (0 <= probability <= 1 and min(shares) >= 0 and sum(shares) <= 1):
        raise ValueError(f"{rule}: the probability must be in [0, 1], and shares must add up to at most 1")


def mask_words(
    tokens: np.ndarray, vocabulary: Vocabulary, rule: WordMasking, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Mask random words of `tokens` (int64 [t], without special tokens).

    Return the changed tokens, and a mask of the tokens that get labels (bool [t]).
    """
    word_index = np.cumsum(~vocabulary.continues[tokens]) if rule.whole_words else np.arange(len(tokens))  # (t,)
    word_index = word_index - word_index[:1]  # 0 for the first word, even if a passage begins inside it
    draws = rng.random(word_index[-1] + 1 if len(word_index) else 0)[word_index]  # (t,) one draw per word
    chosen = draws < rule.probability
    changed = tokens.copy()
    masked, replaced = rule.probability * rule.masked, rule.probability * (rule.masked + rule.random)
    changed[draws < masked] = vocabulary.mask
    randomized = (draws >= masked) & (draws < replaced)
    among = vocabulary.ordinary if rule.random_from == "ordinary" else np.arange(len(vocabulary))
    changed[randomized] = rng.choice(among, size=int(randomized.sum()))
    return changed, chosen


def mask_regions(count: int, rule: RegionMasking, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Choose random regions to mask and regions to label. Return two masks, each bool [1 + count].

    Row 0 is the whole image. It is neither masked nor labelled.
    """
    draws = np.concatenate([[1.0], rng.random(count)])
    return draws < rule.probability * rule.masked, (draws < rule.probability)
