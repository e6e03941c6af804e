"""What schemas say with keywords that llguidance does not know: answers that match are taken, and no others."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from router.text.answer_grammar import json_grammar, literal
from router.text.calls.format import Function, Wanted
from router.text.calls.hermes import HermesFormat
from router.text.schema.keywords import Unenforceable

from ...answers import checked, is_answer
from .validity import Validity

TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
SHUT = {"additionalProperties": False}
OPEN = {"type": "object", "additionalProperties": True}
AB = {"type": "object", "properties": {"a": WHOLE, "b": WHOLE}, "additionalProperties": False}
CIRCLE = {"type": "object", "properties": {"kind": {"const": "circle"}, "r": WHOLE}, "required": ["kind", "r"]}
SQUARE = {"type": "object", "properties": {"kind": {"const": "square"}, "side": WHOLE}, "required": ["kind", "side"]}
DRAFT2019 = {"$schema": "https://json-schema.org/draft/2019-09/schema"}
DRAFT4, DRAFT7 = ({"$schema": f"http://json-schema.org/draft-0{number}/schema#"} for number in (4, 7))

CASES: list[tuple[str, dict[str, Any], list[Any], list[Any]]] = [
    ("unknown format", {"type": "string", "format": "path"}, ["", "/x"], [1]),
    ("names of a format", {**OPEN, "propertyNames": {"format": "json-pointer"}}, [{"/a": 1}, {}], [{"a": 1}]),
    ("names of no known format", {**OPEN, "propertyNames": {"format": "path"}}, [{"a": 1}], [1]),
    ("not type", {"not": {"type": ["object", "array", "string"]}}, [1, None, 1.5], ["", {}, []]),
    ("not integer", {"not": WHOLE}, ["1", None], [1, 2]),
    ("not const text", {"type": "string", "not": {"const": "ab"}}, ["", "a", "abc", "b"], ["ab"]),
    ("not enum", {"type": "string", "not": {"enum": ["", "x-1", "x^"]}}, ["x", "x-", "y"], ["", "x-1", "x^"]),
    ("not numbers", {"type": "integer", "not": {"enum": [0, 3]}}, [-1, 1, 4], [0, 3]),
    ("not boolean", {"type": "boolean", "not": {"const": True}}, [False], [True]),
    ("not required", {**AB, "not": {"required": ["a", "b"]}}, [{"a": 1}, {"b": 1}, {}], [{"a": 1, "b": 1}]),
    ("not null member", {**AB, "properties": {"a": {"not": {"type": "null"}}}}, [{"a": 1}, {}], [{"a": None}]),
    ("not properties", {**OPEN, "not": CIRCLE}, [{"kind": "x"}, {}], [{"kind": "circle", "r": 1}]),
    ("not not", {"not": {"not": TEXT}}, ["x"], [1]),
    ("not anyOf", {"not": {"anyOf": [TEXT, {"type": "number"}]}}, [None, {}], ["", 1]),
    ("not bounds", {"type": "integer", "not": {"minimum": 3}}, [2, -9], [3, 4]),
    ("not pattern", {"type": "string", "not": {"pattern": "^(ab|c)$"}}, ["a", "abc", "d"], ["ab", "c"]),
    ("not prefix", {"type": "string", "not": {"pattern": "^ab"}}, ["a", "ba", ""], ["ab", "abc"]),
    ("not contains", {"type": "array", "not": {"contains": TEXT}}, [[1], []], [["x"], [1, "x"]]),
    ("oneOf types", {"oneOf": [TEXT, WHOLE]}, ["", 1], [None]),
    ("oneOf kinds", {"oneOf": [CIRCLE, SQUARE]}, [{"kind": "circle", "r": 1}], [{"kind": "square", "r": 1}]),
    ("oneOf ranges", {"oneOf": [{**WHOLE, "maximum": 3}, {**WHOLE, "minimum": 2}]}, [1, 4], [2, 3]),
    ("oneOf required", {**AB, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}], [{}, {"a": 1, "b": 1}]),
    ("oneOf listed and pattern", {"oneOf": [{"enum": ["a"]}, {**TEXT, "pattern": "^b"}]}, ["a", "b"], ["c"]),
    ("oneOf beginnings", {"oneOf": [{**TEXT, "pattern": r"^https?://.+$"}, {**TEXT, "pattern": r"^\./.+"}]}, ["./a"],
     ["/a"]),
    ("oneOf arrays", {"oneOf": [{"type": "array", "items": TEXT}, {"type": "array", "items": WHOLE}]}, [[1], ["x"]],
     [[], [1, "x"]]),
    ("oneOf closed", {"oneOf": [{**SHUT, "type": "object", "properties": {"a": WHOLE}},
     {**SHUT, "type": "object", "properties": {"b": WHOLE}}]}, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
    ("dependencies of others", {"type": "object", "properties": {"a": WHOLE}, "dependencies": {"a": ["b"]}},
     [{"a": 1, "b": 2}, {}], [1]),
    ("if then", {**AB, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, [{}, {"a": 1, "b": 2}], [{"a": 1}]),
    ("if else", {"if": TEXT, "then": {"minLength": 2}, "else": WHOLE}, ["ab", 1], ["a", None]),
    ("dependentRequired", {**AB, "dependentRequired": {"b": ["a"]}}, [{"a": 1}, {"a": 1, "b": 1}], [{"b": 1}]),
    ("dependencies", {**DRAFT7, **AB, "dependencies": {"b": ["a"]}}, [{}, {"a": 1, "b": 1}], [{"b": 1}]),
    ("dependentSchemas", {**AB, "dependentSchemas": {"b": {"required": ["a"]}}}, [{"a": 1, "b": 1}], [{"b": 1}]),
    ("at least one", {**AB, "minProperties": 1}, [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}], [{}]),
    ("at most one", {**AB, "maxProperties": 1}, [{"a": 1}, {}], [{"a": 1, "b": 1}]),
    ("at most one, open", {**AB, "additionalProperties": True, "maxProperties": 1}, [{"c": 1}, {"a": 1}],
     [{"a": 1, "c": 1}]),
    ("names of a pattern", {**OPEN, "propertyNames": {"pattern": "^x"}}, [{"xy": 1}, {}], [{"y": 1}]),
    ("listed names", {**OPEN, "propertyNames": {"enum": ["p", "q"]}}, [{"p": 1, "q": 2}], [{"r": 1}]),
    ("short names", {**OPEN, "propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
    ("contains", {"type": "array", "maxItems": 2, "contains": {"const": 1}}, [[1], [2, 1]], [[], [2], [2, 2]]),
    ("unique", {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}, [["b", "a"], []], [["a", "a"]]),
    ("unevaluated", {"type": "object", "properties": {"a": WHOLE}, "unevaluatedProperties": False}, [{"a": 1}],
     [{"b": 1}]),
    ("tuple of draft 7", {**DRAFT7, "items": [WHOLE, TEXT], "additionalItems": False}, [[1, "x"]], [[1, "x", 2]]),
    ("bounds of draft 4", {**DRAFT4, **WHOLE, "minimum": 3, "exclusiveMinimum": True}, [4], [3]),
    ("$ref beside which draft 7 ignores all", {**DRAFT7, "$ref": "#/definitions/t", "minLength": 3,
     "definitions": {"t": TEXT}}, ["a"], [1]),
    ("anchor", {"$ref": "#t", "$defs": {"x": {"$anchor": "t", **TEXT}}}, ["a"], [1]),
    ("identifier", {"$id": "http://x/a", "$ref": "b", "$defs": {"x": {"$id": "b", **TEXT}}}, ["a"], [1]),
    ("into a oneOf", {"oneOf": [TEXT, WHOLE], "$defs": {"n": {"oneOf": [{"$ref": "#/oneOf/1"}]}}}, [1], [1.5]),
    ("recursion beside others", {"$defs": {"t": {"properties": {"k": {"$ref": "#/$defs/t", "required": ["a"]}}}},
     "$ref": "#/$defs/t", "type": "object"}, [{"k": {"a": 1}}, {"k": {"k": {"a": 1}, "a": 1}}],
     [{"k": {}}, {"k": {"k": {}, "a": 1}}]),
    ("recursion of two", {"$defs": {
        "a": {"properties": {"k": {"type": "object", "anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}]}}},
        "b": {"required": ["x"], "properties": {"x": {"allOf": [{"$ref": "#/$defs/a"}, {"required": ["k"]}]}}}},
     "$ref": "#/$defs/a"}, [{"k": {}}, {"k": {"x": {"k": {}}}}], [{"k": 1}, {"k": []}]),
    ("recursion", {"$defs": {"n": {**OPEN, "properties": {"n": {"oneOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}},
     "$ref": "#/$defs/n"}, [{"n": {"n": None}}], [{"n": 1}]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "matching", "others"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_exactly_what_matches_is_an_answer(schema: dict[str, Any], matching: list[Any], others: list[Any]) -> None:
    validity, grammar = Validity(schema), checked(json_grammar(schema))
    for value in matching:
        assert not validity.problem(json.dumps(value).encode()) and is_answer(grammar, json.dumps(value))
    for value in others:
        assert not is_answer(grammar, json.dumps(value))


WRONG_ONCE = [
    ({"type": "object", "properties": {"a": WHOLE}, "additionalProperties": True}, '{"\\u0061": "x"}'),
    ({"oneOf": [{**OPEN, "properties": {"a": TEXT}, "required": ["a"]}, {**OPEN, "properties": {"b": TEXT}}]},
     '{"a": "x"}'),
    ({"oneOf": [{"type": "object", "properties": {"a": TEXT}, "required": ["a"]},
                {"type": "object", "properties": {"b": TEXT}}]}, '{"a": "x"}'),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text"), WRONG_ONCE)
def test_what_was_accepted_once_and_matches_nothing_is_not(schema: dict[str, Any], text: str) -> None:
    """A name spelled with an escape, and a `oneOf` whose cases excluded each other only once they were closed."""
    assert Validity(schema).problem(text.encode())
    assert not is_answer(checked(json_grammar(schema)), text)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"properties": {"x": {"not": {"multipleOf": 3}}}}, "#/properties/x/not: the opposite of `multipleOf`"),
        ({"type": "number", "not": WHOLE}, "#/not: a number that is not an integer"),
        ({"type": "string", "not": {"pattern": "a+b"}}, "#/not: the opposite of this `pattern`"),
        ({"oneOf": [{**TEXT, "pattern": "a+"}, {**TEXT, "pattern": "b+"}]}, "#/oneOf/1: this case of a `oneOf` may"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"uniqueItems": True}}}, "#/$defs/x/uniqueItems: `uniqueItems` can only"),
        ({"contains": TEXT}, "#/contains: `contains` can only be enforced for 1 of at most 16 items"),
        ({"contains": TEXT, "maxItems": 3, "maxContains": 1}, "#/contains: `maxContains` cannot be enforced"),
        ({**OPEN, "minProperties": 2}, "#/minProperties: minProperties 2 cannot be enforced for members"),
        ({**OPEN, "propertyNames": {"format": "ipv4"}}, "#/propertyNames: `propertyNames` with `format`"),
        ({"allOf": [AB], "unevaluatedProperties": False}, "#/unevaluatedProperties: `unevaluatedProperties` of an"),
        ({"properties": {f"p{i}": True for i in range(30)}, **SHUT, "minProperties": 9}, "more than 64 ways to choose"),
        ({"properties": {"x": {}}, "required": [[]]}, "#/required: must be an array of strings"),
        ({"properties": {"x": {}}, "dependentRequired": {"a": [[]]}}, "#/dependentRequired: must be an object of"),
        ({**DRAFT7, "dependencies": {"a": [[]]}, "properties": {}}, "#/dependencies/a: must be an array of"),
        ({"propertyNames": {"not": {"pattern": 5}}}, "#/propertyNames/not/pattern: must be a string"),
        ({"oneOf": [{"pattern": 5}, TEXT]}, "#/oneOf/0/pattern: must be a string"),
        ({"not": {"minLength": 1.5}}, "#/not/minLength: must be a non-negative integer"),
        ({"not": {"maximum": True}}, "#/not/maximum: must be a number"),
        ({"if": {"type": [[]]}, "then": False}, "#/if/type: must be a string or an array of strings"),
        ({**DRAFT2019, "$recursiveAnchor": True, "$recursiveRef": "#"}, "$recursiveRef with $recursiveAnchor"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused_with_its_place(schema: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError) as error:
        checked(json_grammar(schema))
    assert problem in str(error.value)


def test_arguments_of_calls_leave_out_what_cannot_be_enforced() -> None:
    members = {"t": {**TEXT, "not": {"pattern": "a+b"}}, "u": {"oneOf": [TEXT, {**TEXT, "pattern": "a+"}]}}
    function = Function("f", None, {"type": "object", "properties": members, "required": ["t"]})
    grammar = checked(HermesFormat().grammar(Wanted([function], required=True, several=False), literal))
    call = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
    assert is_answer(grammar, call % '{"t": "aab", "u": "b"}') and not is_answer(grammar, call % '{"t": 1}')


def test_annotations_and_unused_definitions_do_not_count() -> None:
    schema = {"description": "d" * 200_000, "$defs": {"unused": {"enum": ["x" * 200_000]}}, **TEXT}
    assert len(json_grammar(schema)) < 1_000 and is_answer(checked(json_grammar(schema)), '"x"')


def test_many_kinds_are_told_apart_at_once() -> None:
    kinds = [{"type": "object", "properties": {"kind": {"const": str(i)}}, "required": ["kind"]} for i in range(300)]
    grammar = checked(json_grammar({"oneOf": kinds}))
    assert is_answer(grammar, '{"kind": "299"}') and not is_answer(grammar, '{"kind": "300"}')


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"properties": {f"p{i}": {"not": {"required": [f"q{i}"]}}}} for i in range(24)]},
        {"oneOf": [{"anyOf": [{"required": [f"p{i}{j}"]} for j in range(9)]} for i in range(24)]},
        {"not": {"allOf": [{"oneOf": [{"required": ["x"]}, {"$ref": "#/not"}]}] * 20}},
    ],
)
def test_the_work_on_a_hostile_schema_is_bounded(schema: dict[str, Any]) -> None:
    """It ends with a grammar or with a refusal, of which the compiler's own bounds then take care."""
    try:
        assert json_grammar(schema)
    except Unenforceable as error:
        assert str(error).startswith("#")


@pytest.mark.parametrize("key", ["properties", "allOf", "not", "oneOf", "if", "items", "dependentSchemas", "$ref"])
@pytest.mark.parametrize("junk", [1, "x", None, [1], {"a": 1}, 1e400])
def test_what_is_no_schema_is_a_refusal(key: str, junk: object) -> None:
    with pytest.raises(ValueError):
        checked(json_grammar({"type": "object", key: junk, "then": 1}))


@pytest.mark.parametrize(
    "key", ["required", "type", "enum", "minProperties", "maxItems", "pattern", "dependentRequired"]
)
@pytest.mark.parametrize("junk", [1.5, "x", None, [1], [[]], {"a": 1}, -1, float("inf"), float("nan")])
def test_junk_in_a_keyword_is_no_error_of_ours(key: str, junk: object) -> None:
    schemas = {key: junk}, {"not": {key: junk}}, {"oneOf": [{key: junk}, {"type": "null", "not": {key: junk}}]}
    for schema in schemas:
        with contextlib.suppress(Unenforceable):
            json_grammar(schema)
