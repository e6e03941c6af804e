"""Requests for a form of the answer: the grammar that workers get, and the requests that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from common.wire.sampling_params import MAX_GRAMMAR_CHARS
from router.text.calls.registry import FORMATS

from ..answers import is_answer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "f"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'

ASKED: list[tuple[dict[str, Any], str, str]] = [  # fields, an answer, no answer
    ({"response_format": {"type": "json_object"}}, '{"b": []}', "[]"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, '{"a": 1}', "{}"),
    ({"structured_outputs": {"json": SCHEMA}}, '{"a": 1}', '{"a": "1"}'),
    ({"structured_outputs": {"json": '{"type": "null"}'}}, "null", "nul"),
    ({"structured_outputs": {"json_object": True}}, "{}", "1"),
    ({"structured_outputs": {"regex": "a+"}}, "aaa", "aab"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "maybe"),
    ({"structured_outputs": {"grammar": 'root ::= "x" | "y"'}}, "y", "z"),
    ({"guided_json": SCHEMA}, '{"a": 1}', "{}"),
    ({"guided_regex": "a+"}, "a", ""),
    ({"guided_choice": ["yes"]}, "yes", "y"),
    ({"guided_grammar": 'start: "x"'}, "x", "xx"),
    # of llama.cpp, TGI with huggingface_hub, and SGLang
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '{"a": 1}', "{}"),
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, '{"a": 1}', "{}"),
    ({"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}}, '{"a": 1}', "{}"),
    ({"response_format": {"type": "json", "value": SCHEMA}}, '{"a": 1}', "{}"),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, '{"a": 1}', "{}"),
    ({"response_format": {"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}}}, '{"a": 1}', "{}"),
    ({"response_format": {"type": "json_schema", "value": SCHEMA}}, '{"a": 1}', "{}"),
    ({"response_format": {"type": "regex", "value": "a+"}}, "aa", "b"),
    ({"json_schema": SCHEMA, "grammar": "", "regex": ""}, '{"a": 1}', "{}"),
    ({"json_schema": '{"type": "null"}'}, "null", "nul"),
    ({"json_schema": {}}, "[1]", "a"),
    ({"grammar": 'root ::= "x" | "y"'}, "y", "z"),
    ({"regex": "a+"}, "a", ""),
    ({"ebnf": 'root ::= "x"'}, "x", "xx"),
]
CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [TOOL]}, "Any text.", CALL.replace("1", '"1"')),
    ({"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False}, CALL, f"{CALL}\n{CALL}"),
    ({"tools": [TOOL], "tool_choice": "required"}, f"{CALL}\n{CALL}", "text"),
    ({"tools": [TOOL], "tool_choice": NAMED}, CALL, f"{CALL}\n{CALL}"),
    ({"tools": [TOOL], "tool_choice": NAMED, "guided_regex": "a"}, CALL, "a"),
    ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "{}", "text"),
    ({"tools": [TOOL], "tool_choice": "none", "guided_regex": "a"}, "a", CALL),
]


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize("endpoint", ["completion", "chat"])
@pytest.mark.parametrize(("fields", "good", "bad"), ASKED)
async def test_workers_get_the_grammar(
    running: Any, endpoint: str, fields: dict[str, Any], good: str, bad: str
) -> None:
    reply = await getattr(running, endpoint)(max_tokens=1, n=2, **fields)
    assert reply.status_code == 200, reply.text
    first, second = (request.params.grammar for request in running.engine.requests)
    assert first == second
    assert is_answer(first, good) and not is_answer(first, bad)


@pytest.mark.parametrize(("fields", "good", "bad"), CHATS)
async def test_workers_get_the_grammar_of_calls(running: Any, fields: dict[str, Any], good: str, bad: str) -> None:
    reply = await running.chat(max_tokens=1, **fields)
    assert reply.status_code == 200, reply.text
    (request,) = running.engine.requests
    assert is_answer(request.params.grammar, good) and not is_answer(request.params.grammar, bad)


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"structured_outputs": {"regex": None}},
     {"response_format": None, "guided_json": None}, {"grammar": "", "json_schema": None, "regex": "", "ebnf": ""}],
)  # fmt: skip
async def test_what_asks_for_nothing_leaves_the_answer_free(running: Any, fields: dict[str, Any]) -> None:
    assert (await running.completion(max_tokens=1, **fields)).status_code == 200
    assert running.engine.requests[0].params.grammar == ""


REFUSED: list[tuple[dict[str, Any], str, str]] = [  # fields, param, part of the message
    ({"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
    ({"response_format": {}}, "response_format.type", "is required"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "is required"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format", "is required"),
    (
        {"structured_outputs": {"json": {"properties": {"a": {"not": {"multipleOf": 3}}}}}},
        "structured_outputs.json",
        "#/properties/a/not: the opposite of `multipleOf` cannot be enforced",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strng"}}}},
        "response_format.json_schema.schema",
        "strng",
    ),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "invalid JSON"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "must be a JSON schema"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "must not be empty"),
    ({"structured_outputs": {"grammar": "start: none"}}, "structured_outputs.grammar", "none"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "only one"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "not supported"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "only one"),
    ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs.disable_any_", "not supported"),
    ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema", "not allowed with type 'text'"),
    ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema", "'text'"),
    ({"response_format": {"type": "json_object", "value": "a"}}, "response_format.value", "not allowed"),
    ({"response_format": {"type": "regex", "value": SCHEMA}}, "response_format.value", "not allowed"),
    ({"response_format": {"type": "regex"}}, "response_format", "value: is required with type 'regex'"),
    ({"response_format": {"type": "json"}}, "response_format", "value: is required with type 'json'"),
    ({"response_format": {"type": "json", "value": {}, "schema": {}}}, "response_format.value", "only one"),
    ({"response_format": {"type": "json_object", "schema": 1}}, "response_format.schema", "must be"),
    ({"grammar": {"type": "json", "value": SCHEMA}}, "grammar", "must be"),
    ({"grammar": 'root ::= "a"', "json_schema": SCHEMA}, "grammar", "only one"),
    ({"json_schema": "{"}, "json_schema", "invalid JSON"),
    ({"ebnf": "root ::= ("}, "ebnf", "cannot be used"),
    ({"guided_regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "guided_regex", f"{MAX_GRAMMAR_CHARS}"),
    ({"guided_choice": ["x" * 70_000, "y" * 70_000]}, "guided_choice", f"{MAX_GRAMMAR_CHARS:,}"),
]
REFUSED_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "a b"),
    ({"tools": [{}]}, "tools[0]", "is required"),
    ({"tools": [TOOL, TOOL]}, "tools", "duplicate function name 'f'"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/x"}}}]}, "tools", "exist"),
    ({"tool_choice": "required"}, "tool_choice", "at least one tool"),
    ({"tool_choice": "always"}, "tool_choice", "'required'"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
        "'g'",
    ),
    ({"tools": [TOOL], "guided_regex": "a"}, "guided_regex", "with tools, only a JSON schema"),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED + REFUSED_CHATS)
async def test_what_cannot_be_is_refused(running: Any, fields: dict[str, Any], param: str, message: str) -> None:
    reply = await running.chat(**fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"].startswith(param) and message in error["message"], error
    assert running.engine.requests == []


async def test_the_log_tells_nothing_of_a_schema(running: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert (await running.chat(guided_json={"type": "secret"})).status_code == 400
    (record,) = [record for record in caplog.records if record.msg == "request"]
    assert vars(record)["reason"] == "guided_json: cannot be used"


@pytest.mark.parametrize("fields", [fields for fields, _, _ in [*ASKED, *CHATS]])
async def test_no_grammar_is_written_in_the_router(
    running: Any, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """It is a client's text, which may take the interpreter for minutes."""

    def fail(*_: object, **__: object) -> str:
        raise AssertionError("read in the router")

    for name in ("free_grammar", "regex_grammar", "choice_grammar", "json_grammar"):
        monkeypatch.setattr(f"router.text.grammar_writer.{name}", fail)
    for form in FORMATS:
        monkeypatch.setattr(type(form), "grammar", fail)
    reply = await running.chat(max_tokens=1, **fields)
    assert reply.status_code == 200, reply.text
    (request,) = running.engine.requests
    assert request.params.grammar
