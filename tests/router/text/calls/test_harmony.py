"""The channels of gpt-oss: thoughts, remarks, calls and the answer."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.calls.dialect import Dialect
from router.text.calls.format import Function
from router.text.calls.harmony import ChannelTokens, HarmonyFormat
from router.text.parts import CallPart, Part, TextPart, ThoughtPart, joined

from ....examples import examples

FORM = HarmonyFormat()
NAMES = ("now", "get_weather")
FUNCTIONS = {name: Function(name) for name in NAMES}
THOUGHT = "<|channel|>analysis<|message|>Hm, hm.<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>Hello!"
HEAD = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
ARGUMENTS = '{"city": "Paris", "<|end|>": "}"}'
CALL = f"{HEAD}{ARGUMENTS}<|call|>"
WEATHER = ("get_weather", ARGUMENTS)


def parts_of(pieces: list[str], *, cut: bool = False, **options: Any) -> list[Part]:
    scanner = FORM.scanner(start=0, only_calls=False, functions=FUNCTIONS, **options)
    parts = [part for piece in pieces for part in scanner.push(piece)] + scanner.flush(cut=cut)
    text = "".join(pieces)
    assert all(text[part.start :].startswith(part.text) for part in parts if isinstance(part, TextPart))
    return joined(parts)


def taken_apart(text: str, **options: Any) -> list[Any]:
    parts = parts_of([text], **options)
    assert parts_of(list(text), **options) == parts
    for place in range(1, len(text)):
        assert parts_of([text[:place], text[place:]], **options) == parts, text[:place]
    shown = {ThoughtPart: lambda part: ("thought", part.text), TextPart: lambda part: part.text}
    return [
        (part.name, part.arguments) if isinstance(part, CallPart) else shown[type(part)](part)  # type: ignore[no-untyped-call]
        for part in parts
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FINAL, ["Hello!"]),
        (f"{THOUGHT}{NEXT}{FINAL}", [("thought", "Hm, hm."), "Hello!"]),
        (f"{THOUGHT}{NEXT}{FINAL}<|return|>", [("thought", "Hm, hm."), "Hello!"]),
        (f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{FINAL}", [("thought", "Hm, hm.\nHm, hm."), "Hello!"]),
        (f"{THOUGHT}{NEXT}{CALL}", [("thought", "Hm, hm."), WEATHER]),
        (CALL.removesuffix("<|call|>"), [WEATHER]),
        (f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALL}", ["I look.", WEATHER]),
        (f"{CALL}{NEXT}{CALL}{NEXT}{FINAL}", [WEATHER, WEATHER, "Hello!"]),
        (" to=functions.now<|channel|>commentary json<|message|>{}<|call|>", [("now", "{}")]),
        (f"{THOUGHT}{NEXT} to=functions.now<|channel|>commentary<|message|> {{}}",
         [("thought", "Hm, hm."), ("now", "{}")]),
        ("<|channel|>commentary to=now <|constrain|>json<|message|>{}", [("now", "{}")]),
        ("<|channel|>analysis to=browser.search<|message|>q<|end|>" + NEXT + FINAL, [("thought", "q"), "Hello!"]),
        ("Plain text, as <b>ever</b>.", ["Plain text, as <b>ever</b>."]),
        ('{"a": "<|chan"}', ['{"a": "<|chan"}']),
        ("to be", ["to be"]),
        (" to", [" to"]),
        ("<|channel|>final", ["<|channel|>final"]),
        ("<|channel|>final<|end|>x", ["<|channel|>final", "x"]),
        ("<|channel|>final<|message|>Hi <|ch", ["Hi <|ch"]),
        (f"{HEAD}no object<|call|>", [f"{HEAD}no object"]),
        (f"{HEAD}", [HEAD]),
        ("<|channel|>commentary to=functions.then<|message|>{}", ["{}"]),
        (f"{THOUGHT}Oh.", [("thought", "Hm, hm."), "Oh."]),
        (f"<|channel|>analysis<|message|>Hm{FINAL}", [("thought", "Hm"), "Hello!"]),
        ("", []),
    ],
)  # fmt: skip
def test_an_answer_taken_apart(text: str, expected: list[Any]) -> None:
    assert taken_apart(text) == expected


def test_without_thoughts_they_are_text() -> None:
    assert taken_apart(f"{THOUGHT}{NEXT}{FINAL}", thoughts=False) == ["Hm, hm.", "Hello!"]


@pytest.mark.slow
def test_an_answer_that_is_cut_off_shows_no_part_of_a_mark() -> None:
    text = f"{THOUGHT}{NEXT}{CALL}"
    for end in range(len(text)):
        items = taken_apart(text[:end], cut=True)
        said = text[:end].partition("<|message|>")[2][: len("Hm, hm.")].partition("<")[0]
        assert items[:1] == ([("thought", said)] if said else [])
        assert all(name == "get_weather" and ARGUMENTS.startswith(given) for name, given in items[1:])
        assert len(items) < 2 or end > text.index('{"city')


def test_a_call_that_is_cut_off_is_not_whole() -> None:
    for end in range(1, len(ARGUMENTS) + 1):
        scanner = FORM.scanner(start=0, only_calls=False, functions=FUNCTIONS)
        scanner.push(HEAD + ARGUMENTS[:end])
        assert scanner.calls_are_whole is (end == len(ARGUMENTS))


said = st.text("a<|> \né🙂{}", max_size=12)
messages = st.tuples(st.sampled_from(["analysis", "final", "commentary", *NAMES]), said)


@pytest.mark.slow
@settings(max_examples=examples(200), deadline=None)
@given(answer=st.lists(messages, max_size=4), data=st.data())
def test_how_an_answer_is_divided_changes_nothing(answer: list[tuple[str, str]], data: st.DataObject) -> None:
    written = [
        FORM.written([(kind, '{"a": 1}')]) if kind in NAMES else f"<|channel|>{kind}<|message|>{text}<|end|>"
        for kind, text in answer
    ]
    text = NEXT.join(written)
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *places, len(text)])]
    for cut in (False, True):
        assert parts_of(pieces, cut=cut) == parts_of([text], cut=cut) == parts_of(list(text), cut=cut)
    parts = parts_of(pieces)
    assert [part.name for part in parts if isinstance(part, CallPart)] == [kind for kind, _ in answer if kind in NAMES]
    texts = "".join([part.text for part in parts if isinstance(part, TextPart)])
    assert texts == "".join([text for kind, text in answer if kind in ("final", "commentary")])
    thoughts = [text for kind, text in answer if kind == "analysis" and text]
    assert "".join([p.text for p in parts if isinstance(p, ThoughtPart)]) == "\n".join(thoughts)


# ---------------------------------------------------------------- messages that come back


def call(name: str, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {}}}


def test_each_call_of_a_message_is_one_of_its_own_before_its_result() -> None:
    calls = [call("now", "a"), call("get_weather", "b")]
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in ("b", "a")]
    user = {"role": "user", "content": "hi"}
    turn = {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm.", "tool_calls": calls}
    assert Dialect(FORM, single_calls=True).messages([user, turn, *results, user]) == [
        user,
        {"role": "assistant", "content": "", "thinking": "Hm.\nWait.", "tool_calls": calls[:1]},
        results[1],
        {"role": "assistant", "content": "", "tool_calls": calls[1:]},
        results[0],
        user,
    ]
    answer = {"role": "assistant", "content": "Hi", "reasoning_content": "Hm."}
    assert FORM.messages([answer]) == [{"role": "assistant", "content": "Hi", "thinking": "Hm."}]


@pytest.mark.parametrize(
    ("text", "counted"),
    [
        (f"{THOUGHT}{NEXT}{FINAL}", THOUGHT),
        (f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{CALL}", THOUGHT * 2),
        (f"{THOUGHT.removesuffix('<|end|>')}{NEXT}{FINAL}", THOUGHT.removesuffix("<|end|>")),
        (f"{FINAL}<|return|>", ""),
        ("<|channel|>commentary<|message|>First.<|end|>" + NEXT + FINAL, ""),
        ("<|channel|>analysis to=functions.now<|message|>{}<|call|>", ""),
        ("<|channel|>analysis to=python<|message|>1<|call|>", "<|channel|>analysis to=python<|message|>1<|call|>"),
        ("<|channel|>analysis<|message|>cut", "<|channel|>analysis<|message|>cut"),
        ("<|channel|>analysis", ""),
        ("Hello!", ""),
    ],
)
def test_tokens_of_the_analysis_channel_are_counted(text: str, counted: str) -> None:
    """Each mark and each character is one token here. What clients see as a thought counts."""
    tokens = re.findall(r"<\|\w+\|>|.", text)
    counter = ChannelTokens(lambda i: tokens[i].encode(), NAMES)
    for i in range(len(tokens)):
        counter.push([i])
    assert counter.count == len(re.findall(r"<\|\w+\|>|.", counted))
