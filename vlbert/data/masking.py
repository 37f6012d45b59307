"""Masked words and masked regions: which are chosen, and what becomes of them (paper 3.3)."""

from dataclasses import dataclass

import numpy as np

from vlbert.data.vocabulary import Vocabulary


@dataclass(frozen=True)
class WordMasking:
    """Task 1, masked words. Defaults: the authors' code; the paper masks every chosen word (masked = 1)."""

    probability: float = 0.15  # that a word is chosen: it has a label
    masked: float = 0.8  # share of chosen words that become [MASK] ...
    random: float = 0.1  # ... or random tokens; the rest stays as it is
    whole_words: bool = True  # choose whole words; else single tokens

    def __post_init__(self):
        _check_shares(self, self.probability, self.masked, self.random)


@dataclass(frozen=True)
class RegionMasking:
    """Task 2, masked regions. Defaults: the authors' code; the paper masks every chosen region (masked = 1)."""

    probability: float = 0.15  # that a region is chosen: it has a label
    masked: float = 0.9  # share of chosen regions that are masked; the rest stays visible

    def __post_init__(self):
        _check_shares(self, self.probability, self.masked)


def _check_shares(rule: WordMasking | RegionMasking, probability: float, *shares: float) -> None:
    if not (0 <= probability <= 1 and min(shares) >= 0 and sum(shares) <= 1):
        raise ValueError(f"{rule}: a probability lies in [0, 1], and shares add up to at most 1")


def mask_words(
    tokens: np.ndarray, vocabulary: Vocabulary, rule: WordMasking, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(masked tokens int64 [t], bool [t] of the tokens with a label); `tokens` int64 [t] hold no special token."""
    word = np.cumsum(~vocabulary.continues[tokens]) if rule.whole_words else np.arange(len(tokens))  # (t,) its number
    word = word - word[:1]  # a passage may begin in the middle of a word, which then is word 0
    draws = rng.random(word[-1] + 1 if len(word) else 0)[word]  # (t,) one draw a word, shared by its tokens
    chosen = draws < rule.probability
    changed = tokens.copy()
    masked, replaced = rule.probability * rule.masked, rule.probability * (rule.masked + rule.random)
    changed[draws < masked] = vocabulary.mask
    random = (draws >= masked) & (draws < replaced)
    changed[random] = rng.choice(vocabulary.ordinary, size=int(random.sum()))
    return changed, chosen


def mask_regions(count: int, rule: RegionMasking, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(bool [1 + count] of the masked regions, same of those with a label); row 0, the whole image, is neither."""
    draws = np.concatenate([[1.0], rng.random(count)])
    return draws < rule.probability * rule.masked, (draws < rule.probability)
