"""Stop strings count in content only, however an answer with thoughts and calls is divided."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.calls.format import Function
from router.text.content_stops import ContentStops
from router.text.parts import TextPart, joined
from router.text.stop_strings import StopScanner
from router.text.thinking import ThinkingScanner
from router.text.thought_marks import KNOWN

from ...examples import examples
from .calls.formats import FORMATS
from .calls.test_scanner import NOW, WEATHER
from .test_stop_strings import naive_cut

FUNCTIONS = {"now": Function("now"), "get_weather": Function("get_weather", None, {"properties": {}})}


def stops_in(name: str, stops: list[str], *, thinks: bool = False, include_stop: bool = False) -> ContentStops:
    thinking = ThinkingScanner(KNOWN[0]) if thinks else None
    return ContentStops(
        StopScanner(stops, include_stop=include_stop),
        thinking,
        lambda start: FORMATS[name].scanner(start=start, only_calls=False, functions=FUNCTIONS),
    )


def read(scanner: ContentStops, pieces: list[str], *, cut: bool = False, num_first: int = 0) -> tuple[str, str | None]:
    """What is shown of an answer in pieces, and the stop string that ended it. In the first pieces none may end."""
    shown = ""
    for number, piece in enumerate(pieces):
        more, stopped = scanner.push(piece, may_end=number >= num_first)
        shown += more
        assert stopped is (scanner.stop is not None)
        if stopped:
            assert scanner.push("more") == ("", True)
            break
    return shown + scanner.flush(cut=cut), scanner.stop


@pytest.mark.parametrize("name", FORMATS)
def test_calls_have_no_stop_strings(name: str) -> None:
    calls = FORMATS[name].written([WEATHER, NOW])
    content = "<|channel|>final<|message|>Hi STOP there" if name == "harmony" else "Hi STOP there"
    for stop in ('"', "Paris", "city", ":", "<", "\n", "now", ">", "a"):
        for pieces in ([calls], list(calls)):
            assert read(stops_in(name, [stop]), pieces) == (calls, None), stop
            assert read(stops_in(name, [stop]), pieces[: len(pieces) // 2 + 1], cut=True)[1] is None, stop
    for pieces in ([calls + content], list(calls + content), list(content + calls)):
        shown, found = read(stops_in(name, ["STOP"]), pieces)
        assert found == "STOP" and shown.endswith("Hi ") and not shown.endswith("STOP")


def test_thoughts_have_no_stop_strings() -> None:
    for answer in ("<think>a STOP b</think>\n\nHi STOP", "Hi STOP"):
        for pieces in ([answer], list(answer)):
            shown = answer[: answer.rindex("STOP")]
            assert read(stops_in("hermes", ["STOP"], thinks=True), pieces) == (shown, "STOP")
    begun = "<thi"
    assert read(stops_in("hermes", ["<t"], thinks=True), list(begun)) == ("", "<t")
    assert read(stops_in("hermes", ["<t"], thinks=True), list(begun), cut=True) == ("<thi", None)
    harmony = "<|channel|>analysis<|message|>a STOP b<|end|><|start|>assistant<|channel|>final<|message|>Hi STOP there"
    assert read(stops_in("harmony", ["STOP"]), list(harmony)) == (harmony[: harmony.rindex("STOP")], "STOP")


def test_a_call_ends_the_text_before_it() -> None:
    call = FORMATS["hermes"].written([NOW])
    assert read(stops_in("hermes", ["ab"]), list(f"a{call}b")) == (f"a{call}b", None)


def test_the_beginning_of_a_mark_is_content_once_it_is_none() -> None:
    scanner = stops_in("hermes", ["l y"])
    assert [scanner.push(piece) for piece in ("x <too", "l yes")] == [("x ", False), ("<too", True)]


def test_the_first_tokens_end_nothing() -> None:
    assert read(stops_in("hermes", ["ab"]), list("abxab"), num_first=2) == ("abx", "ab")
    assert read(stops_in("hermes", ["ab"]), list("<tool ab ab"), num_first=8) == ("<tool ab ", "ab")


said = st.text("ab<[{ \n", max_size=6)
called = st.lists(st.sampled_from([WEATHER, NOW]), min_size=1, max_size=2)


@pytest.mark.slow
@settings(max_examples=examples(200), deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    rows=st.lists(st.tuples(said, called), max_size=3),
    last=said,
    stops=st.lists(st.text("ab<[{ \n", min_size=1, max_size=3), min_size=1, max_size=3),
    include_stop=st.booleans(),
    cut=st.booleans(),
    data=st.data(),
)
def test_pieces_give_what_the_whole_gives(
    name: str,
    rows: list[tuple[str, list[tuple[str, str]]]],
    last: str,
    stops: list[str],
    include_stop: bool,
    cut: bool,
    data: st.DataObject,
) -> None:
    form = FORMATS[name]
    answer = "".join([before + form.written(calls) for before, calls in rows]) + last
    calls = form.scanner(start=0, only_calls=False, functions=FUNCTIONS)
    expected: tuple[str, str | None] = answer, None
    for part in joined(calls.push(answer) + calls.flush(cut=cut)):
        if isinstance(part, TextPart) and expected[1] is None:
            shown, stop = naive_cut(part.text, stops, include_stop)
            if stop is not None:
                expected = answer[: part.start + len(shown)], stop
    places = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=8)))
    pieces = [answer[start:end] for start, end in itertools.pairwise([0, *places, len(answer)])]
    for divided in ([answer], pieces, list(answer)):
        assert read(stops_in(name, stops, include_stop=include_stop), divided, cut=cut) == expected
