from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from router.text.stop_strings import MAX_STOP_CHARS, StopScanner

TEXTS = st.text(alphabet="abc\n", max_size=40)
STOPS = st.lists(st.text(alphabet="abc\n", min_size=1, max_size=6), max_size=4)


def naive_cut(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


@given(pieces=st.lists(TEXTS), stops=STOPS, include_stop=st.booleans())
def test_pieces_give_what_the_cut_of_the_full_text_gives(
    pieces: list[str], stops: list[str], include_stop: bool
) -> None:
    scanner = StopScanner(stops, include_stop=include_stop)
    shown, stopped = "", False
    expected, stop = naive_cut("".join(pieces), stops, include_stop)
    for piece in pieces:
        safe, stopped = scanner.push(piece)
        shown += safe
        assert expected.startswith(shown)
    assert (shown + scanner.flush(), scanner.stop, stopped) == (expected, stop, stop is not None)


@given(text=TEXTS, stops=STOPS)
def test_no_more_is_held_than_may_begin_a_stop_string(text: str, stops: list[str]) -> None:
    scanner = StopScanner(stops)
    shown, stopped = scanner.push(text)
    held = scanner.flush()
    assert stopped or (shown + held == text and (not held or any(stop.startswith(held) for stop in stops)))


def test_a_stop_string_over_three_pieces() -> None:
    scanner = StopScanner(["<end>"])
    assert [scanner.push(piece) for piece in ("a <", "en", "d> b")] == [("a ", False), ("", False), ("", True)]
    assert scanner.push("more") == ("", True) and scanner.flush() == ""


def test_what_began_a_stop_string_but_is_none_is_let_out() -> None:
    scanner = StopScanner(["aab"])
    assert scanner.push("aaa") == ("a", False)
    assert scanner.push("c") == ("aac", False)


def test_the_string_that_is_complete_first_wins() -> None:
    assert StopScanner(["abcd", "bc"]).push("abcd") == ("a", True)


def test_of_two_that_end_together_the_longest_wins() -> None:
    assert StopScanner(["c", "abc"]).push("xabc") == ("x", True)


def test_no_stop_strings() -> None:
    assert StopScanner([]).push("anything") == ("anything", False)


@pytest.mark.slow
def test_a_repetitive_text_is_read_once() -> None:
    scanner = StopScanner(["a" * MAX_STOP_CHARS])
    for _ in range(200):
        for _ in range(MAX_STOP_CHARS // 2):
            scanner.push("a")
        assert scanner.push("b") == ("a" * (MAX_STOP_CHARS // 2) + "b", False)


@pytest.mark.parametrize("stops", [[""], ["a", ""], ["x" * (MAX_STOP_CHARS + 1)]])
def test_stop_strings_out_of_bounds(stops: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="stop string"):
        StopScanner(stops)
