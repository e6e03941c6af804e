import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.wire.messages import TokenDelta
from common.wire.sampling_params import TokenLogprobs
from router.dispatch.stream import StreamConflict, TokenStream


def delta(index, *tokens, finish="", logprobs=()):
    return TokenDelta("r", 0, index, tokens, finish, logprobs=logprobs)


@pytest.fixture
def stream():
    return TokenStream(100, with_logprobs=False)


def test_the_repeated_first_token_is_dropped(stream):
    assert stream.add(delta(0, 7))
    assert stream.add(delta(0, 7, 8))
    assert stream.take()[0] == (7, 8)


def test_a_pure_repetition_grows_nothing(stream):
    stream.add(delta(0, 7))
    assert not stream.add(delta(0, 7))


def test_a_delta_that_runs_ahead_waits(stream):
    assert not stream.add(delta(1, 8, finish="stop"))
    assert stream.has_gap
    assert stream.add(delta(0, 7))
    assert (stream.token_ids, stream.finish_reason, stream.has_gap) == ([7, 8], "stop", False)


def test_a_contradiction_is_refused(stream):
    stream.add(delta(0, 7))
    with pytest.raises(StreamConflict, match="position 0"):
        stream.add(delta(0, 9, 10))
    assert stream.token_ids == [7]


def test_more_than_max_tokens_is_refused():
    with pytest.raises(StreamConflict, match="position 3; the request allows 2"):
        TokenStream(2, with_logprobs=False).add(delta(1, 7, 8))


def test_logprobs_follow_their_tokens():
    stream = TokenStream(9, with_logprobs=True)
    stream.add(delta(0, 7, logprobs=(TokenLogprobs(-1.0),)))
    stream.add(delta(0, 7, 8, logprobs=(TokenLogprobs(-1.0), TokenLogprobs(-2.0))))
    assert stream.take() == ((7, 8), (TokenLogprobs(-1.0), TokenLogprobs(-2.0)))


def test_missing_logprobs_are_refused():
    with pytest.raises(StreamConflict, match="0 logprobs for 1 tokens"):
        TokenStream(9, with_logprobs=True).add(delta(0, 7))


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_id_is_refused(stream, token):
    with pytest.raises(StreamConflict, match="invalid token ids"):
        stream.add(delta(0, token))


def test_nothing_comes_after_the_end(stream):
    stream.add(delta(0, 7, finish="stop"))
    assert not stream.add(delta(1, 8))
    assert stream.token_ids == [7]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.data())
def test_any_order_and_any_repetition_gives_the_same_stream(tokens, data):
    stream = TokenStream(30, with_logprobs=False)
    starts = data.draw(st.permutations(range(len(tokens))))
    taken = []
    for start in starts:
        end = data.draw(st.integers(start + 1, len(tokens)))
        stream.add(delta(start, *tokens[start:end], finish="length" if end == len(tokens) else ""))
        taken.extend(stream.take()[0])
    assert taken == tokens
    assert stream.finish_reason == "length"


def logprobs(*values):
    return tuple(TokenLogprobs(float(-value)) for value in values)


@pytest.fixture
def echo():
    return TokenStream(100, with_logprobs=False, num_prompt_logprobs=5)


def test_logprobs_come_in_parts_and_are_taken_once(echo):
    echo.add_prompt_logprobs(1, logprobs(1, 2))
    echo.add_prompt_logprobs(3, logprobs(3, 4, 5))
    echo.add(delta(0, 7))
    assert echo.take_prompt_logprobs() == logprobs(1, 2, 3, 4, 5)
    assert echo.take_prompt_logprobs() == ()


def test_logprobs_that_come_again_change_nothing(echo):
    """Of another attempt, which begins anew; in bfloat16 they differ a little."""
    echo.add_prompt_logprobs(1, logprobs(1, 2, 3))
    echo.add_prompt_logprobs(1, logprobs(8))
    echo.add_prompt_logprobs(2, logprobs(8, 8, 4))
    echo.add_prompt_logprobs(5, logprobs(5))
    assert echo.take_prompt_logprobs() == logprobs(1, 2, 3, 4, 5)


@pytest.mark.parametrize(("start", "count"), [(4, 1), (3, 4), (2**20, 1)])
def test_logprobs_with_a_gap_or_too_many_are_refused(echo, start, count):
    echo.add_prompt_logprobs(1, logprobs(1, 2))
    with pytest.raises(StreamConflict, match="2 of 5 received"):
        echo.add_prompt_logprobs(start, logprobs(*range(count)))
    echo.add_prompt_logprobs(3, logprobs(3, 4, 5))
    assert echo.take_prompt_logprobs() == logprobs(1, 2, 3, 4, 5)


def test_logprobs_that_nobody_asked_for_are_refused(stream):
    with pytest.raises(StreamConflict, match="0 of 0"):
        stream.add_prompt_logprobs(1, logprobs(1))


def test_tokens_before_all_logprobs_are_refused(echo):
    echo.add_prompt_logprobs(1, logprobs(1, 2, 3, 4))
    with pytest.raises(StreamConflict, match="only 4 of 5"):
        echo.add(delta(0, 7))
    echo.add_prompt_logprobs(5, logprobs(5))
    assert echo.add(delta(0, 7))
