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
    return np.stack([hidden for hidden, _ in drawn]), np.stack([asked for _, asked in drawn])


def test_words_are_masked_replaced_and_kept_in_the_shares_of_the_rule():
    hidden, asked = many(WordMasking(0.15, masked=0.8, random=0.1))
    assert asked.mean() == pytest.approx(0.15, abs=0.01)
    masked = hidden == WORDS.mask
    assert not (masked & ~asked).any()
    assert masked[asked].mean() == pytest.approx(0.8, abs=0.02)
    kept = (hidden == TOKENS)[asked]
    assert kept.mean() == pytest.approx(0.1 + 0.1 / 25, abs=0.02)
    assert (hidden == TOKENS)[~asked].all()


def test_the_papers_rule_masks_every_chosen_word():
    hidden, asked = many(WordMasking(0.15, masked=1.0, random=0.0))
    assert ((hidden == WORDS.mask) == asked).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(len(SPECIALS), len(WORDS) - 1), max_size=12), st.booleans(), st.integers(0, 99))
def test_only_chosen_tokens_change_and_words_are_chosen_whole(tokens, whole_words, seed):
    given_tokens = np.array(tokens, np.int64)
    hidden, asked = mask_words(
        given_tokens, WORDS, WordMasking(0.5, whole_words=whole_words), np.random.default_rng(seed)
    )
    assert given_tokens.tolist() == tokens, "the input is left as it was"
    assert (hidden[~asked] == given_tokens[~asked]).all()
    if whole_words:
        goes_on = WORDS.continues[given_tokens[1:]]
        assert (asked[1:] == asked[:-1])[goes_on].all()


def test_single_tokens_are_chosen_by_themselves_where_the_rule_says_so():
    tokens = np.array([WORDS.ids[p] for p in ("w1", "##p1", "##p2", "w2", "##p3")])
    apart = many(WordMasking(0.3, whole_words=False), tokens, runs=99)[1]
    assert (apart[:, 0] != apart[:, 1]).any()
    words = many(WordMasking(0.3), tokens, runs=99)[1]
    assert (words[:, 0] != words[:, 3]).any()


def test_random_tokens_are_never_special():
    hidden, asked = many(WordMasking(0.5, masked=0.0, random=1.0))
    assert hidden[asked].min() >= len(SPECIALS)
    assert len(np.unique(hidden[asked])) == 25


def test_regions_are_masked_in_the_share_of_the_rule_and_the_whole_image_never():
    drawn = [mask_regions(10, RegionMasking(0.15, masked=0.9), np.random.default_rng(i)) for i in range(3000)]
    hidden, asked = (np.stack(part) for part in zip(*drawn, strict=True))
    assert asked.shape == (3000, 11)
    assert not asked[:, 0].any()
    assert not (hidden & ~asked).any()
    assert asked[:, 1:].mean() == pytest.approx(0.15, abs=0.01)
    assert hidden[asked].mean() == pytest.approx(0.9, abs=0.02)
    papers = [mask_regions(10, RegionMasking(0.15, masked=1.0), np.random.default_rng(i)) for i in range(100)]
    assert all((hidden == asked).all() for hidden, asked in papers)


@pytest.mark.parametrize("shares", [{"masked": 0.8, "random": 0.3}, {"probability": 1.5}, {"masked": -0.1}])
def test_shares_that_cannot_be_are_refused(shares):
    with pytest.raises(ValueError, match="shares add up to at most 1"):
        WordMasking(**shares)
