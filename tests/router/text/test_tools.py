"""Functions, calls and results as text in prompts, for chat templates without tools."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest

from common.model_files.template import ChatTemplate
from router.text.calls.format import Function
from router.text.calls.hermes import HermesFormat
from router.text.calls.registry import FORMATS
from router.text.chat_prompt import chat_prompt
from router.text.tools import tools_as_text

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


@pytest.mark.parametrize("arguments", ["not JSON", "[1]", "1e999", '{"a":' * 3000], ids=len)
def test_earlier_calls_may_have_any_arguments(arguments: str) -> None:
    for call_format in FORMATS:
        assert "f" in call_format.written([("f", arguments)])


def test_two_users_who_speak_one_after_the_other_stay_two() -> None:
    """Only results of tools are joined with their neighbours; other messages stay as the client sent them."""
    template = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    shown = chat_prompt(template, [USER, USER], functions=BOTH)
    assert shown.count("[user]") == 2


def test_a_template_with_tools_gets_them() -> None:
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

    assert spent_s(5000) < 1.0, "if each result is copied once for each that follows, 25 GB are"
