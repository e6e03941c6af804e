"""Detection of a chat template's tool-call format from what it renders, and messages adapted to it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.model_files.template import ChatTemplate
from router.text.calls.dialect import dialect_of
from router.text.calls.format import Function
from router.text.calls.registry import FORMATS
from router.text.chat_prompt import chat_prompt

from ...templates import (
    DEEPSEEK,
    HARMONY,
    KIMI,
    LLAMA3,
    LLAMA3_SINGLE,
    MEMBERS,
    MISTRAL,
    PLAIN,
    STRICT,
    TEMPLATES,
    VARIANTS,
    WRITTEN,
    template,
)

NAMES = tuple(dict.fromkeys(each.name for each in FORMATS))
WEATHER = Function("get_weather", "Weather of a city", {"properties": {"city": {"type": "string"}}})
USER = {"role": "user", "content": "Weather?"}
ARGUMENTS = '{"city": "Paris"}'


def call(call_id: str, name: str = "get_weather") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": ARGUMENTS}}


def turn(*calls: dict[str, Any], **members: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **members}


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": f"18 °C by {call_id}"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_is_that_of_the_template(name: str) -> None:
    dialect = dialect_of(ChatTemplate(TEMPLATES[name]))
    kind, _, variant = name.partition(", ")
    assert dialect.native and dialect.parses and dialect.format.name == kind
    assert getattr(dialect.format, variant or "none", not variant) and dialect.is_known
    others = {getattr(dialect.format, other, False) for other in ("compact", "functools", "fenced") if other != variant}
    assert others == {False}
    if kind == "harmony":
        return
    shown = chat_prompt(ChatTemplate(TEMPLATES[name]), [USER, turn(call("a")), result("a")], functions=[WEATHER])
    scanner = dialect.format.scanner(start=0, only_calls=False, functions={"get_weather": WEATHER})
    assert scanner.push(shown) and scanner.num_calls == 1, "its own calls can be read"


OTHER_MINIMAX = template(
    ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="{{ f.name }}">'
    + MEMBERS + "<{{ k }}>{{ v }}]<]minimax[>[</{{ k }}>{% endfor %}]<]minimax[>[</invoke>"
)  # fmt: skip
"""A format that no scanner here reads, though it has tags of others."""


@pytest.mark.parametrize("source", [PLAIN, STRICT, OTHER_MINIMAX, None])
def test_a_template_without_calls_gets_them_in_words(source: str | None) -> None:
    dialect = dialect_of(ChatTemplate(source))
    assert not dialect.native and dialect.format.name == "hermes" and not dialect.is_known


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_that_a_template_omits_are_written_as_text(name: str) -> None:
    dialect = dialect_of(ChatTemplate(WRITTEN[name]))
    assert dialect.native and dialect.writes_calls and dialect.format.name == name
    messages = [USER, turn(call("a"), call("b", "now"), content="I look.\n"), result("a"), result("b")]
    shown = chat_prompt(ChatTemplate(WRITTEN[name]), messages, functions=[WEATHER], dialect=dialect)
    functions = dict.fromkeys(("get_weather", "now"), WEATHER)
    scanner = dialect.format.scanner(start=0, only_calls=False, functions=functions)
    scanner.push(shown.partition("I look.")[2])
    assert scanner.num_calls == 2 and "18 °C by a" in shown and "18 °C by b" in shown


UNKNOWN = {
    "a list after other tags": template('{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}',
                                        first="<TOOLCALL>[", last="]</TOOLCALL>", between=", "),
    "another recipient": template(">>>{{ f.name }}\n{{ f.arguments | tojson }}"),
    "JSON between tags of other arguments": template("<function={{ f.name }}>{{ f.arguments | tojson }}</function>"),
    "text without quotes": template("[{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v }}{% endfor %})]"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_format_that_resembles_another_familys_is_not_taken_for_it(name: str) -> None:
    dialect = dialect_of(ChatTemplate(UNKNOWN[name]))
    assert not dialect.native and not dialect.is_known and dialect.format.name == "hermes"


def test_a_template_that_renders_calls_but_describes_no_functions_has_its_format_in_words() -> None:
    source = DEEPSEEK.replace("{% if tools %}{{ tools | tojson }}{% endif %}", "")
    dialect = dialect_of(ChatTemplate(source))
    assert not dialect.native and dialect.is_known and dialect.format.name == "deepseek"
    shown = chat_prompt(ChatTemplate(source), [USER], functions=[WEATHER], dialect=dialect)
    assert dialect.format.written([("second_function", "{}")])[30:-30] in shown


@pytest.mark.parametrize("name", NAMES)
def test_a_parser_may_be_named(name: str) -> None:
    dialect = dialect_of(ChatTemplate(PLAIN), name)
    assert not dialect.native and dialect.format.name == name
    shown = chat_prompt(ChatTemplate(PLAIN), [USER, turn(call("a"))], functions=[WEATHER], dialect=dialect)
    assert dialect.format.written([("get_weather", ARGUMENTS)]) in shown
    if name != "hermes":
        assert dialect.format.written([("first_function", '{"argument": "value"}'), ("second_function", "{}")]) in shown
    native = dialect_of(ChatTemplate(LLAMA3), name)
    assert native.native and native.format.name == name


def test_a_named_parser_keeps_the_templates_variant() -> None:
    named = dialect_of(ChatTemplate(TEMPLATES["mistral, compact"]), "mistral")
    assert getattr(named.format, "compact", False)


def test_none_reads_nothing_and_tells_the_model_all_the_same() -> None:
    dialect = dialect_of(ChatTemplate(MISTRAL), "none")
    assert not dialect.parses and dialect.native and dialect.format.name == "mistral"


def test_mistrals_templates_get_ids_of_nine_characters() -> None:
    messages = [USER, turn(call("call_1"), call("call_2")), result("call_1"), result("call_2"), USER]
    shown = chat_prompt(ChatTemplate(MISTRAL), messages)
    listed, _ = json.JSONDecoder().raw_decode(shown[shown.index("] [{") + 2 :])
    ids = [given["id"] for given in listed]
    assert len(set(ids)) == 2 and all(len(one) == 9 and one.isalnum() for one in ids)
    kept = chat_prompt(ChatTemplate(MISTRAL), [USER, turn(call("abcdef123"))])
    assert '"id": "abcdef123"' in kept


def test_kimis_template_gets_the_ids_that_the_model_makes() -> None:
    messages = [USER, turn(call("a"), call("b", "now")), result("b"), result("a"), USER, turn(call("c"))]
    shown = chat_prompt(ChatTemplate(KIMI), messages, functions=[WEATHER])
    for number, name in enumerate(("get_weather", "now", "get_weather")):
        assert f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>" in shown
    adapted = dialect_of(ChatTemplate(KIMI)).messages(messages)
    assert [one["tool_call_id"] for one in adapted[2:4]] == ["functions.now:1", "functions.get_weather:0"]


def test_deepseeks_templates_get_arguments_as_text() -> None:
    assert dialect_of(ChatTemplate(DEEPSEEK)).text_arguments
    shown = chat_prompt(ChatTemplate(DEEPSEEK), [USER, turn(call("a"), call("b", "now"))])
    assert f"get_weather<｜tool▁sep｜>{ARGUMENTS}<" in shown and f"now<｜tool▁sep｜>{ARGUMENTS}<" in shown


def test_harmonys_template_gets_one_call_a_message_and_thoughts_by_its_name() -> None:
    answer = turn(call("a"), call("b", "now"), reasoning_content="Hm.", content="Wait.")
    messages = [USER, answer, result("b"), result("a")]
    shown = chat_prompt(ChatTemplate(HARMONY), messages, functions=[WEATHER])
    places = [shown.index(text) for text in ("Hm.\nWait.", "functions.get_weather", "by a", "functions.now", "by b")]
    assert places == sorted(places)


@pytest.mark.parametrize(("kind", "source"), VARIANTS.items())
def test_variants_of_a_format_are_recognised(kind: str, source: str) -> None:
    dialect = dialect_of(ChatTemplate(source))
    assert dialect.native and dialect.format.name == kind
    assert dialect.single_calls is (kind == "llama3")


def test_only_templates_that_show_one_call_a_message_get_one() -> None:
    single = {name for name, source in TEMPLATES.items() if dialect_of(ChatTemplate(source)).single_calls}
    assert single == {"harmony"}


def test_a_template_that_refuses_two_calls_gets_them_one_after_the_other() -> None:
    messages = [USER, turn(call("a"), call("b", "now"), content="Wait."), result("b"), result("a"), USER]
    shown = chat_prompt(ChatTemplate(LLAMA3_SINGLE), messages, functions=[WEATHER])
    places = [
        shown.index(text) for text in ('{"name": "get_weather"', "by a", '{"name": "now"', "by b", "[user]Weather?")
    ]
    assert places[:4] == sorted(places[:4]) and shown.rindex("[user]Weather?") > places[3]


def test_results_that_are_missing_leave_the_calls_in_order() -> None:
    messages = [USER, turn(call("a"), call("b", "now")), result("b")]
    shown = chat_prompt(ChatTemplate(LLAMA3_SINGLE), messages, functions=[WEATHER])
    assert shown.index("get_weather") < shown.index('{"name": "now"') < shown.index("by b")
    assert shown.count("by b") == 1
