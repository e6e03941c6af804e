"""Calls of functions: the grammar that makes them, how a model is told, and how an answer is taken apart."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diptych.common.model.template import ChatTemplate
from diptych.router.text.chat_prompt import chat_prompt
from diptych.router.text.grammar import checked
from diptych.router.text.tools import CallPart, CallScanner, Function, call_grammar, knows_tools

from ..answers import is_answer

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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("text", "accepted"), ANSWERS)
def test_what_an_answer_may_be(form: str, text: str, accepted: str) -> None:
    assert accepts(call_grammar(BOTH, **FORMS[form]), text) is (form in accepted.split("; "))


def test_what_schemas_have_that_is_not_known_is_left_out() -> None:
    """A client's tools come from elsewhere: better called with arguments that nobody checked than not at all."""
    odd = Function("now", None, {"properties": {}, "if": {}, "not": {"required": ["a"]}})
    assert accepts(call_grammar([odd], required=True, several=False), OTHER)


# ---------------------------------------------------------------- taking an answer apart


def taken_apart(text: str, size: int) -> tuple[str, list[tuple[str, str]], CallScanner]:
    """Content, and name and arguments of each call, of a text that comes in pieces of a size."""
    scanner, content, calls = CallScanner(), "", list[tuple[str, str]]()
    for i in range(0, len(text), size):
        more, parts = scanner.push(text[i : i + size])
        content += more
        for part in parts:
            assert part.index == len(calls) - (not part.name), "parts belong to the call that began last"
            if part.name:
                calls.append((part.name, part.arguments))
            else:
                calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments)
    return content + scanner.flush(), calls, scanner


TRICKY = json.dumps({"a": '}\n</tool_call>"\\', "b": [{"c": "{"}], "d": {}})


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain <text> <tool", "plain <text> <tool", []),
        (CALL, "", [("get_weather", '{"city": "Paris"}')]),
        (f"See: {CALL}\n{OTHER}", "See: ", [("get_weather", '{"city": "Paris"}'), ("now", "{}")]),
        (OTHER.replace("{}", TRICKY), "", [("now", TRICKY)]),
        (f"{OTHER}\n\nDone.", "Done.", [("now", "{}")]),
        ("<<tool_call>\n" + OTHER.removeprefix("<tool_call>\n"), "<", [("now", "{}")]),
        ("", "", []),
    ],
)
def test_an_answer_taken_apart(text: str, content: str, calls: list[tuple[str, str]], size: int) -> None:
    assert taken_apart(text, size)[:2] == (content, calls)


@pytest.mark.parametrize("end", range(len(CALL) + 1))
def test_an_answer_that_is_cut_off(end: int) -> None:
    """Whatever has come is told, and nothing twice."""
    content, calls, scanner = taken_apart(f"Hm {CALL[:end]}", 1)
    assert content == ("Hm " + CALL[:end] if end < len("<tool_call>") else "Hm ")
    begun = end >= CALL.index('{"city')
    assert [name for name, _ in calls] == ["get_weather"] * begun and scanner.num_calls == begun
    assert not begun or '{"city": "Paris"}'.startswith(calls[0][1])


def test_arguments_come_as_they_are_made() -> None:
    scanner = CallScanner()
    scanner.push(CALL[: CALL.index('"Par')])
    assert scanner.push('"Par')[1] == [CallPart(0, arguments='"Par')]


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


def test_a_template_without_tools_is_told_in_words() -> None:
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
    assert described[0]["function"] == WEATHER._asdict()
    assert described[1]["function"]["name"] == "now" and described[1]["function"]["parameters"]["type"] == "object"
    assert user == "user]Weather in Paris?"
    assert assistant == f"assistant]{CALL}\n{OTHER}"
    responses = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in ("18 °C", "noon"))
    assert results == f"user]{responses}\nSo?\n"


def test_a_conversation_with_calls_is_told_even_when_nothing_may_be_called_any_more() -> None:
    shown = chat_prompt(ChatTemplate(PLAIN), [USER, CALLS, *RESULTS])
    assert "You can call" not in shown and CALL in shown and "[tool]" not in shown


def test_two_users_who_speak_one_after_the_other_stay_two() -> None:
    """Only what tools say is put together with what comes next to it: the rest is the client's business."""
    template = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    shown = chat_prompt(template, [USER, USER], functions=BOTH)
    assert shown.count("[user]") == 2


def test_a_template_that_knows_tools_gets_them() -> None:
    assert knows_tools(NATIVE) and not knows_tools(PLAIN) and not knows_tools(None)
    shown = chat_prompt(ChatTemplate(NATIVE), [USER, CALLS, *RESULTS], functions=BOTH)
    assert json.loads(shown.partition("[user]")[0]) == [function.as_tool() for function in BOTH]
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>' in shown
    assert "[tool]18 °C" in shown and "You can call" not in shown
