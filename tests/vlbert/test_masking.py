import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlbert.data.masking import RegionMasking, WordMasking, mask_regions, mask_words
from vlbert.data.vocabulary import SPECIALS, Vocabulary

WORDS = Vocabulary([*SPECIALS, *(f"w{i}" for i in range(20)), *(f"##p{i}" for i in range(5))])
TOKENS = np.arange(5, 25)


def many(rule: WordMasking, tokens: np.ndarray = TOKENS, runs: int = 3000) -> tuple[np.ndarray, np.ndarray]:
    drawn = [mask_words(tokens, WORDS, rule, np.random.default_rng(i)) for i in range(runs)]
    return np.stack([masked_tokens for masked_tokens, _ in drawn]), np.stack([labelled for _, labelled in drawn])


def test_words_are_masked_replaced_and_kept_in_their_shares():
    masked_tokens, labelled = many(WordMasking(0.15, masked=0.8, random=0.1))
    assert labelled.mean() == pytest.approx(0.15, abs=0.01)
    masked = masked_tokens == WORDS.mask
    assert not (masked & ~labelled).any()
    assert masked[labelled].mean() == pytest.approx(0.8, abs=0.02)
    kept = (masked_tokens == TOKENS)[labelled]
    assert kept.mean() == pytest.approx(0.1 + 0.1 / 25, abs=0.02)
    assert (masked_tokens == TOKENS)[~labelled].all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(len(SPECIALS), len(WORDS) - 1), max_size=12), st.booleans(), st.integers(0, 99))
def test_only_chosen_tokens_change_and_words_are_chosen_whole(tokens, whole_words, seed):
    given_tokens = np.array(tokens, np.int64)
    masked_tokens, labelled = mask_words(
        given_tokens, WORDS, WordMasking(0.5, whole_words=whole_words), np.random.default_rng(seed)
    )
    assert given_tokens.tolist() == tokens, "the input is left as it was"
    assert (masked_tokens[~labelled] == given_tokens[~labelled]).all()
    if whole_words:
        goes_on = WORDS.continues[given_tokens[1:]]
        assert (labelled[1:] == labelled[:-1])[goes_on].all()


def test_without_whole_words_tokens_are_chosen_alone():
    tokens = np.array([WORDS.ids[p] for p in ("w1", "##p1", "##p2", "w2", "##p3")])
    apart = many(WordMasking(0.3, whole_words=False), tokens, runs=99)[1]
    assert (apart[:, 0] != apart[:, 1]).any()
    words = many(WordMasking(0.3), tokens, runs=99)[1]
    assert (words[:, 0] != words[:, 3]).any()


def test_random_tokens_are_ordinary_ones_or_all():
    for random_from, lowest in (("ordinary", len(SPECIALS)), ("all", 0)):
        masked_tokens, labelled = many(WordMasking(0.5, masked=0.0, random=1.0, random_from=random_from))
        found, counts = np.unique(masked_tokens[labelled], return_counts=True)
        assert found.tolist() == list(range(lowest, len(WORDS)))
        assert counts.min() > 0.9 * counts.mean()


def test_regions_are_masked_in_their_share_and_the_whole_image_never():
    drawn = [mask_regions(10, RegionMasking(0.15, masked=0.9), np.random.default_rng(i)) for i in range(3000)]
    masked, labelled = (np.stack(part) for part in zip(*drawn, strict=True))
    assert labelled.shape == (3000, 11)
    assert not labelled[:, 0].any()
    assert not (masked & ~labelled).any()
    assert labelled[:, 1:].mean() == pytest.approx(0.15, abs=0.01)
    assert masked[labelled].mean() == pytest.approx(0.9, abs=0.02)
    papers = [mask_regions(10, RegionMasking(0.15, masked=1.0), np.random.default_rng(i)) for i in range(100)]
    assert all((masked == labelled).all() for masked, labelled in papers)


@pytest.mark.parametrize("shares", [{"masked": 0.8, "random": 0.3}, {"probability": 1.5}, {"masked": -0.1}])
def test_impossible_shares_are_refused(shares):
    with pytest.raises(ValueError, match="shares must add up to at most 1"):
        WordMasking(**shares)
