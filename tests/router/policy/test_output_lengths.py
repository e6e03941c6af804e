from hypothesis import given
from hypothesis import strategies as st

from router.policy.output_lengths import NUM_KEPT, UNKNOWN_LENGTH, OutputLengths

MOST = 10**6


def test_nothing_is_known_before_the_first_answer():
    assert OutputLengths().expected_more("default", 0, MOST) == UNKNOWN_LENGTH
    assert OutputLengths().expected_more("default", 0, 10) == 10


def test_classes_are_told_apart_and_a_new_one_is_like_all():
    lengths = OutputLengths()
    for _ in range(100):
        lengths.observe("chat", 20)
        lengths.observe("batch", 1000)
    assert 20 <= lengths.expected_more("chat", 0, MOST) <= 25
    assert 980 <= lengths.expected_more("batch", 0, MOST) <= 1000
    assert 480 <= lengths.expected_more("new", 0, MOST) <= 530


def test_an_answer_that_outlasts_most_is_compared_with_those_that_did_too():
    lengths = OutputLengths()
    for length in [10] * 90 + [1000] * 10:
        lengths.observe("chat", length)
    assert lengths.expected_more("chat", 0, MOST) < 120
    assert 800 < lengths.expected_more("chat", 100, MOST) < 900
    assert lengths.expected_more("chat", 2000, MOST) == UNKNOWN_LENGTH


def test_old_answers_are_forgotten():
    lengths = OutputLengths()
    for length in [1000] * 1000 + [10] * NUM_KEPT:
        lengths.observe("chat", length)
    assert lengths.expected_more("chat", 0, MOST) < 12


@given(st.lists(st.integers(0, 500), max_size=600), st.integers(0, 600))
def test_what_is_expected_is_the_mean_over_the_latest_longer_ones(observed, num_tokens):
    lengths = OutputLengths()
    for length in observed:
        lengths.observe("chat", length)
    longer = [length - num_tokens for length in observed[-NUM_KEPT:] if length > num_tokens]
    mean = (sum(longer) + UNKNOWN_LENGTH) / (len(longer) + 1)
    assert lengths.expected_more("chat", num_tokens, MOST) == round(mean)
