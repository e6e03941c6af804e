from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.common.model.tokenizer import Tokenizer
from diptych.router.text.stream import TextDelta, TextStream

EOS = 257


def ids(text: str) -> list[int]:
    """With the tiny model's tokenizer a token is a byte."""
    return list(text.encode())


def test_text_and_offsets_come_token_by_token(tiny: Tokenizer) -> None:
    stream = TextStream(tiny, offset=10)
    assert stream.push(ids("aé")[:2]) == TextDelta("a", False, 2, (10, 11))
    assert stream.push(ids("é")[1:]) == TextDelta("é", False, 1, (11,))


def test_the_end_token_counts_but_is_no_text(tiny: Tokenizer) -> None:
    assert TextStream(tiny).push([*ids("ab"), ord("!")], "stop") == TextDelta("ab", False, 3, (0, 1, 2))
    assert TextStream(tiny).push([ord("!")], "stop").text == ""


def test_the_last_token_of_a_length_finish_is_text(tiny: Tokenizer) -> None:
    assert TextStream(tiny).push(ids("ab!"), "length").text == "ab!"


def test_include_stop_keeps_an_end_token_that_is_text(tiny: Tokenizer) -> None:
    assert TextStream(tiny, include_stop=True).push(ids("ab!"), "stop").text == "ab!"
    assert TextStream(tiny, include_stop=True).push([*ids("ab"), EOS], "stop").text == "ab"


def test_tokens_after_a_stop_string_do_not_count(tiny: Tokenizer) -> None:
    stream = TextStream(tiny, stops=["END"])
    assert stream.push(ids("ab EN")) == TextDelta("ab ", False, 5, (0, 1, 2, 3, 4))
    assert stream.push(ids("D tail"), "length") == TextDelta("", True, 1, (5,))
    assert stream.stop == "END"
    assert stream.push(ids("more")) == TextDelta("", True, 0, ())


def test_the_end_lets_out_what_was_held(tiny: Tokenizer) -> None:
    stream = TextStream(tiny, stops=["END"])
    assert stream.push([*ids("a EN"), 0xE2, 0x82]).text == "a "
    assert stream.push([EOS], "stop").text == "EN\ufffd"


def test_a_stop_string_in_what_the_end_lets_out(tiny: Tokenizer) -> None:
    stream = TextStream(tiny, stops=["\ufffd"])
    delta = stream.push([*ids("a"), 0xE2], "length")
    assert (delta.text, delta.stopped, delta.num_tokens) == ("a", True, 2)


def test_an_empty_last_push(tiny: Tokenizer) -> None:
    stream = TextStream(tiny, stops=["ab"])
    stream.push(ids("xa"))
    assert stream.push((), "length") == TextDelta("a", False, 0, ())


@given(
    tokens=st.lists(st.integers(0, 260), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=4),
    stops=st.lists(st.text(alphabet="ab\ufffdé", min_size=1, max_size=3), max_size=3),
    finish=st.sampled_from(["stop", "length"]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_how_tokens_are_grouped_does_not_matter(
    tiny: Tokenizer, tokens: list[int], cuts: list[int], stops: list[str], finish: str
) -> None:
    whole, parts = TextStream(tiny, stops=stops), TextStream(tiny, stops=stops)
    tokens = [*tokens, EOS]
    edges = [0, *sorted(min(cut, len(tokens) - 1) for cut in cuts), len(tokens)]
    deltas = [
        parts.push(tokens[start:end], finish if end == len(tokens) else "")
        for start, end in zip(edges, edges[1:], strict=False)
    ]
    expected = whole.push(tokens, finish)
    assert "".join(delta.text for delta in deltas) == expected.text
    assert sum(delta.num_tokens for delta in deltas) == expected.num_tokens
    assert tuple(offset for delta in deltas for offset in delta.offsets) == expected.offsets
    assert (deltas[-1].stopped, parts.stop) == (expected.stopped, whole.stop)
