"""Calls of functions: their grammar, their description in prompts, and the parts of an answer."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.model_files.template import ChatTemplate
from router.text.answer_grammar import literal
from router.text.calls.dialect import dialect_of
from router.text.calls.format import Function, Wanted
from router.text.calls.hermes import HermesFormat
from router.text.calls.scanner import MAX_REST_CHARS, CallScanner
from router.text.chat_prompt import chat_prompt
from router.text.parts import CallPart, Part, TextPart, joined
from router.text.tools import tools_as_text

from ...examples import examples
from ..answers import checked, is_answer

WEATHER = Function(
    "get_weather",
    "Weather of a city",
    {
        "$defs": {"unit": {"enum": ["C", "F"]}},
        "properties": {"city": {"type": "string"}, "unit": {"$ref": "#/$defs/unit"}},
        "required": ["city"],
    },
)
NOW = Function("now")
BOTH = (WEATHER, NOW)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def call_grammar(functions: Sequence[Function], **wanted: Any) -> str:
    return HermesFormat().grammar(Wanted(functions, **wanted), literal)


def hermes_scanner(*, only_calls: bool = False) -> CallScanner:
    return HermesFormat().scanner(start=0, only_calls=only_calls, functions={})


def accepts(grammar: str, text: str) -> bool:
    return is_answer(checked(grammar), text)


FORMS: dict[str, dict[str, Any]] = {
    "auto": {"required": False, "several": True},
    "auto, one": {"required": False, "several": False},
    "required": {"required": True, "several": True},
    "required, one": {"required": True, "several": False},
    "auto, or JSON": {"required": False, "several": True, "answer": {"type": "object"}},
}
ANSWERS: list[tuple[str, str]] = [
    ("", "auto; auto, one"),
    ("Just <b>text</b> <tool_", "auto; auto, one"),
    (CALL, "auto; auto, one; required; required, one; auto, or JSON"),
    (f"Let me see.\n{CALL}", "auto; auto, one"),
    (f"{CALL}\n{OTHER}", "auto; required; auto, or JSON"),
    ('{"a": 1}', "auto; auto, one; auto, or JSON"),
    (CALL.replace("get_weather", "get_whether"), ""),
    (CALL.replace("city", "town"), ""),
    (CALL.replace('"Paris"', '"Paris", "unit": "K"'), ""),
    (CALL.replace('"Paris"', '"Paris", "unit": "F"'), "auto; auto, one; required; required, one; auto, or JSON"),
    (OTHER.replace("{}", '{"more": 1}'), ""),
    (CALL.removesuffix("</tool_call>"), ""),
]


@pytest.mark.quick_cover(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("text", "accepted"), ANSWERS)
def test_what_an_answer_may_be(form: str, text: str, accepted: str) -> None:
    assert accepts(call_grammar(BOTH, **FORMS[form]), text) is (form in accepted.split("; "))


def test_what_schemas_have_that_is_not_known_is_left_out() -> None:
    """Clients often get their tools from other programs, so unchecked arguments are better than no call."""
    odd = Function("now", None, {"properties": {}, "if": {}, "not": {"required": ["a"]}})
    assert accepts(call_grammar([odd], required=True, several=False), OTHER)


@pytest.mark.parametrize("parameters", [{"type": "string"}, {"type": ["object", "null"]}, {}, {"properties": {}}])
def test_arguments_are_an_object_whatever_a_client_calls_them(parameters: dict[str, Any]) -> None:
    """The scanner finds the end of arguments by their braces."""
    grammar = call_grammar([Function("now", None, parameters)], required=True, several=False)
    assert accepts(grammar, OTHER)
    assert not any(accepts(grammar, OTHER.replace("{}", other)) for other in ('""', "null", "[]"))


# ---------------------------------------------------------------- taking an answer apart


def parts_of(pieces: list[str], *, cut: bool = False, **options: Any) -> list[Part]:
    """All parts, joined, of a text in these pieces."""
    scanner = hermes_scanner(**options)
    parts = [part for piece in pieces for part in scanner.push(piece)] + scanner.flush(cut=cut)
    begun = 0
    for part in parts:
        if isinstance(part, CallPart):
            assert bool(part.name) == (part.index == begun), "parts belong to the call that began last"
            begun += bool(part.name)
    assert begun == scanner.num_calls
    return joined(parts)


def taken_apart(text: str, size: int, **options: Any) -> list[str | tuple[str, str]]:
    """The texts, and the name and arguments of each call, in order, of a text in pieces of a size."""
    parts = parts_of([text[i : i + size] for i in range(0, len(text), size)], **options)
    assert all(text[part.start :].startswith(part.text) for part in parts if isinstance(part, TextPart))
    return [
        (part.name, part.arguments) if isinstance(part, CallPart) else part.text
        for part in parts
        if isinstance(part, CallPart | TextPart)
    ]


TRICKY = json.dumps({"a": '}\n</tool_call>"\\', "b": [{"c": "{"}], "d": {}})
WEATHER_CALL, NOW_CALL = ("get_weather", '{"city": "Paris"}'), ("now", "{}")


@pytest.mark.quick_cover(2)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain <text> <tool", ["plain <text> <tool"]),
        (CALL, [WEATHER_CALL]),
        (f"See: {CALL}\n{OTHER}", ["See: ", WEATHER_CALL, NOW_CALL]),
        (OTHER.replace("{}", TRICKY), [("now", TRICKY)]),
        (f"{OTHER}\n\nDone. \n Bye.", [NOW_CALL, "Done. \n Bye."]),
        (f"a {CALL} b \n{OTHER} c", ["a ", WEATHER_CALL, "b \n", NOW_CALL, "c"]),
        ("<<tool_call>\n" + OTHER.removeprefix("<tool_call>\n"), ["<", NOW_CALL]),
        ("", []),
    ],
)
def test_an_answer_taken_apart(text: str, expected: list[Any], size: int) -> None:
    assert taken_apart(text, size) == expected


def test_text_behind_a_call_comes_behind_the_rest_of_the_call() -> None:
    scanner = hermes_scanner()
    scanner.push(CALL[: CALL.index(' "Paris"')])
    parts = scanner.push(' "Paris"}}\n</tool_call>\nDone.')
    assert [type(part) for part in parts] == [CallPart, TextPart]
    assert (
        parts[0] == CallPart(0, arguments=' "Paris"}') and isinstance(parts[1], TextPart) and parts[1].text == "Done."
    )


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": "<tool_call>\\n"} <tool', ['{"a": "<tool_call>\\n"} <tool']),
        (f"{CALL}\n{OTHER}", [WEATHER_CALL, NOW_CALL]),
        ("<tool", ["<tool"]),
        ("<b>", ["<b>"]),
    ],
)
def test_json_that_may_be_there_in_place_of_calls_has_none(text: str, expected: list[Any], size: int) -> None:
    assert taken_apart(text, size, only_calls=True) == expected


@pytest.mark.parametrize("end", range(len(CALL) + 1))
def test_an_answer_that_is_cut_off(end: int) -> None:
    """Each part is given out at once and only once, but a mark or a name only when it is complete."""
    said, *calls = taken_apart(f"Hm {CALL[:end]}", 1, cut=True)
    assert said == "Hm " and [name for name, _ in calls] == ["get_weather"] * (end > CALL.index('{"city'))
    assert not calls or '{"city": "Paris"}'.startswith(calls[0][1])


@pytest.mark.parametrize("end", range(1, len("<tool_call>")))
@pytest.mark.parametrize("only_calls", [False, True])
def test_what_looks_like_a_call_is_text_unless_the_answer_was_cut_off(end: int, only_calls: bool) -> None:
    assert taken_apart(CALL[:end], 1, only_calls=only_calls) == [CALL[:end]]
    assert taken_apart(CALL[:end], 1, only_calls=only_calls, cut=True) == []


def test_arguments_come_as_they_are_made() -> None:
    scanner = hermes_scanner()
    scanner.push(CALL[: CALL.index('"Par')])
    assert scanner.push('"Par') == [CallPart(0, arguments='"Par')]


def test_a_call_in_one_piece_is_one_part() -> None:
    assert hermes_scanner().push(CALL + OTHER) == [CallPart(0, *WEATHER_CALL), CallPart(1, *NOW_CALL)]


said = st.text('a<>tol_c/{}" \né🙂', max_size=14).filter(lambda text: "<tool_call>" not in text)
values = st.recursive(
    st.text('a"\\{}[]<>é🙂\n', max_size=5)
    | st.integers(-9, 9)
    | st.sampled_from(["</tool_call>", "}\n</tool_call>", None]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('k"{', max_size=3), inner, max_size=3),
    max_leaves=6,
)


def call_text(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


called = st.builds(
    lambda name, arguments, ascii: (name, json.dumps(arguments, ensure_ascii=ascii)),
    st.sampled_from(["now", "get_weather"]),
    st.dictionaries(st.text("k<", max_size=2), values, max_size=3),
    st.booleans(),
)


@pytest.mark.slow
@settings(max_examples=examples(400), deadline=None)
@given(answer=st.lists(st.tuples(said, called), max_size=4), last=said, data=st.data())
def test_how_an_answer_is_divided_changes_nothing(
    answer: list[tuple[str, tuple[str, str]]], last: str, data: st.DataObject
) -> None:
    text = "".join([f"{before}{call_text(*call)}" for before, call in answer]) + last
    expected = [part for before, call in answer for part in (before, call)] + [last]
    for i in range(2, len(expected), 2):
        expected[i] = str(expected[i]).lstrip()
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *places, len(text)])]
    parts = parts_of(pieces)
    assert parts == parts_of([text]) == parts_of(list(text))
    assert [(p.name, p.arguments) if isinstance(p, CallPart) else p.text for p in parts] == [*filter(None, expected)]


# ---------------------------------------------------------------- telling a model

USER = {"role": "user", "content": "Weather in Paris?"}
CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}},
        {"id": "2", "type": "function", "function": {"name": "now", "arguments": ""}},
    ],
}
RESULTS = [{"role": "tool", "tool_call_id": "1", "content": "18 °C"}, {"role": "tool", "content": "noon"}]
PLAIN = (
    "{% for m in messages %}{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('roles must take turns') }}{% endif %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
)
NATIVE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
)


def test_a_template_without_tools_gets_them_in_words() -> None:
    conversation = [
        {"role": "system", "content": "Be kind."},
        USER,
        CALLS,
        *RESULTS,
        {"role": "user", "content": "So?"},
    ]
    shown = chat_prompt(ChatTemplate(PLAIN), conversation, functions=BOTH)
    system, user, assistant, results = shown.split("\n[")
    assert system.startswith("[system]Be kind.\n\nYou can call")
    described = [json.loads(line) for line in system.splitlines() if line.startswith('{"type"')]
    assert described[0]["function"] == dataclasses.asdict(WEATHER)
    assert described[1]["function"]["name"] == "now" and described[1]["function"]["parameters"]["type"] == "object"
    assert user == "user]Weather in Paris?"
    assert assistant == f"assistant]{CALL}\n{OTHER}"
    responses = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in ("18 °C", "noon"))
    assert results == f"user]{responses}\nSo?\n"


def test_calls_are_written_as_text_even_without_functions() -> None:
    shown = chat_prompt(ChatTemplate(PLAIN), [USER, CALLS, *RESULTS])
    assert "You can call" not in shown and CALL in shown and "[tool]" not in shown


def test_two_users_who_speak_one_after_the_other_stay_two() -> None:
    """Only results of tools are joined with their neighbours; other messages stay as the client sent them."""
    template = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    shown = chat_prompt(template, [USER, USER], functions=BOTH)
    assert shown.count("[user]") == 2


def test_a_template_with_tools_gets_them() -> None:
    found = [dialect_of(ChatTemplate(source)) for source in (NATIVE, PLAIN, None)]
    assert [dialect.native for dialect in found] == [True, False, False]
    assert {dialect.format.name for dialect in found} == {"hermes"}
    shown = chat_prompt(ChatTemplate(NATIVE), [USER, CALLS, *RESULTS], functions=BOTH)
    assert json.loads(shown.partition("[user]")[0]) == [function.as_tool() for function in BOTH]
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>' in shown
    assert "[tool]18 °C" in shown and "You can call" not in shown


def test_results_of_many_calls_are_joined_in_linear_time() -> None:
    def spent_s(number: int) -> float:
        messages = [{"role": "tool", "content": "x" * 2000} for _ in range(number)]
        began = time.process_time()
        (joined_results,) = tools_as_text(messages, (), HermesFormat())
        assert len(joined_results["content"]) > 2000 * number
        return time.process_time() - began

    few, many = (min(spent_s(number) for _ in range(3)) for number in (500, 5000))
    assert many < 30 * max(few, 0.001), "each result is copied once for each that follows"


def test_little_is_held_of_what_follows_the_arguments_of_a_call() -> None:
    """Held text is read again for each piece of an answer."""
    scanner = hermes_scanner()
    parts = scanner.push('<tool_call>\n{"name": "now", "arguments": {}')
    for _ in range(10_000):
        parts += scanner.push(",")
        assert len(scanner._held) <= MAX_REST_CHARS
    assert [part for part in parts if isinstance(part, CallPart)] == [CallPart(0, "now", "{}")]
