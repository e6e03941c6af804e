"""Which objects of a schema are closed, and that none becomes impossible by it."""

from __future__ import annotations

from typing import Any

import pytest

from router.text.answer_grammar import json_grammar, literal
from router.text.calls.format import Function, Wanted
from router.text.calls.hermes import HermesFormat
from router.text.schema.closed_objects import closed
from router.text.schema.keywords import CLOSED

from ...answers import checked, is_answer

TEXT = {"type": "string"}
A, B = {"properties": {"a": TEXT}}, {"properties": {"b": TEXT}}
SHUT = {CLOSED: True}
BASE = {"$defs": {"base": A}}


def test_objects_have_the_members_that_they_name() -> None:
    inner = {"type": "object", "properties": {"n": TEXT}}
    schema = {
        "type": "object",
        "properties": {"one": inner, "many": {"type": "array", "items": inner}, "any": {"type": "object"}},
        "$defs": {"inner": inner},
    }
    grammar = checked(json_grammar(schema))
    assert is_answer(grammar, '{"one": {"n": ""}, "many": [{"n": ""}], "any": {"x": {"y": 1}}}')
    for more in ('{"one": {"m": ""}}', '{"many": [{"n": "", "m": ""}]}', '{"two": 1}'):
        assert not is_answer(grammar, more)
    assert "additionalProperties" not in schema and "additionalProperties" not in inner, "it is the client's"


def test_members_are_not_invented_for_calls_either() -> None:
    function = Function("now", None, {"type": "object", "properties": {"zone": TEXT}})
    wanted = Wanted([function], required=True, several=False)
    grammar = checked(HermesFormat().grammar(wanted, literal))
    call = '<tool_call>\n{"name": "now", "arguments": %s}\n</tool_call>'
    assert is_answer(grammar, call % '{"zone": "UTC"}') and is_answer(grammar, call % "{}")
    assert not is_answer(grammar, call % '{"time": 1}') and not is_answer(grammar, call % '{"zone": "UTC", "x": 1}')


@pytest.mark.parametrize(
    ("schema", "members"),
    [
        ({**A, "additionalProperties": True}, '{"z": 1}'),
        ({**A, "additionalProperties": TEXT}, '{"z": "1"}'),
        ({"type": "object"}, '{"z": 1}'),
        ({}, '{"z": 1}'),
        ({**A, "required": ["z"]}, '{"z": 1}'),
        ({"properties": {}, "minProperties": 1}, '{"z": 1}'),
    ],
)
def test_an_object_that_speaks_of_other_members_may_have_them(schema: dict[str, Any], members: str) -> None:
    assert is_answer(checked(json_grammar(schema)), members)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [A, B]},
        {"allOf": [{"$ref": "#/$defs/base"}, B], **BASE},
        {"$ref": "#/$defs/base", **B, **BASE},
        {"$ref": "#/$defs/more", **B, "$defs": {"more": {"$ref": "#/$defs/base"}, "base": A}},
        {"$ref": "#/$defs/a~1b%20c", **B, "$defs": {"a/b c": A}},
        {"$ref": "#/$defs/list/allOf/0", **B, "$defs": {"list": {"allOf": [A]}}},
        {"$ref": "#base", **B, "$defs": {"base": {"$anchor": "base", **A}}},
        {"anyOf": [{**A, "required": ["a"]}, {"required": ["b"]}], **B},
        {"allOf": [{"anyOf": [A, {"type": "null"}]}, B]},
    ],
)
def test_what_several_schemas_describe_stays_possible(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema
    assert is_answer(checked(json_grammar(schema)), '{"a": "", "b": ""}')


def test_a_schema_that_refers_to_itself_is_read_once() -> None:
    schema = {"$ref": "#/$defs/base", **B, "$defs": {"base": {**A, "allOf": [{"$ref": "#"}]}}}
    assert closed(schema) == schema


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"allOf": [A]}, {"allOf": [{**A, **SHUT}]}),
        ({"anyOf": [A, B, {"type": "null"}]}, {"anyOf": [{**A, **SHUT}, {**B, **SHUT}, {"type": "null"}]}),
        ({"$ref": "#/$defs/base", **BASE}, {"$ref": "#/$defs/base", "$defs": {"base": {**A, **SHUT}}}),
        ({"$ref": "#base", "$defs": {"x": A}}, {"$ref": "#base", "$defs": {"x": {**A, **SHUT}}}),
        ({"patternProperties": {"^x": A}}, {"patternProperties": {"^x": {**A, **SHUT}}, **SHUT}),
        ({**A, "unevaluatedProperties": False}, {**A, "unevaluatedProperties": False, **SHUT}),
        ({"enum": [A], "default": A, "not": A}, {"enum": [A], "default": A, "not": A}),
        ({"properties": {"properties": A}}, {"properties": {"properties": {**A, **SHUT}}, **SHUT}),
        ({"properties": {"x": True}, "required": "x"}, {"properties": {"x": True}, "required": "x", **SHUT}),
        ({"properties": 1, "allOf": 1, "items": [A]}, {"properties": 1, "allOf": 1, "items": [{**A, **SHUT}]}),
        ({"$ref": 1, **A}, {"$ref": 1, **A}),
        ({"$ref": "#/a/0", "a": [], **A}, {"$ref": "#/a/0", "a": [], **A}),
        ({"$ref": "#/type/0", "type": "object", **A}, {"$ref": "#/type/0", "type": "object", **A}),
    ],
)  # fmt: skip
def test_what_is_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert closed(schema) == expected
