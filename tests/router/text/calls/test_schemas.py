"""Arguments in each format: grammars accept those that match the schema, and scanners read them as written."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from common.grammar.vocabulary import compile_grammar
from common.model_files.template import ChatTemplate
from router.text.calls.dialect import dialect_of
from router.text.calls.format import CallFormat, Function, Wanted
from router.text.calls.scanner import CallScanner
from router.text.parts import CallPart, joined
from router.text.schema.keywords import Unenforceable

from ....examples import examples
from ...templates import TEMPLATES, VARIANTS
from ..schema.test_differential import SCHEMAS as SCHEMAS_AT_RANDOM
from ..schema.test_differential import VALUES as VALUES_AT_RANDOM
from ..schema.test_differential import extended, members
from .formats import FORMATS, OWN_SYNTAX
from .test_format import Vocabulary

CITY = {"type": "object", "properties": {"zip": {"type": "string"}}, "required": ["zip"]}
ODD = ("a<b", "a>b", 'a"b', "a b", " a", "a'b", "é-1", "a{b", "</parameter>", "</arg_key>", "a=b", "", "$x", "class")

SCHEMAS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "a reference to the whole": (
        {"type": "object", "properties": {"n": {"type": "integer"}, "next": {"$ref": "#"}}, "required": ["n"]},
        [{"n": 1}, {"n": 1, "next": {"n": 2, "next": {"n": 3}}}],
        [{"n": 1, "next": {"next": {"n": 1}}}, {"n": 1, "next": 5}, {"n": 1, "next": {"n": "x"}}, {}],
    ),
    "a list of the whole": (
        {"type": "object", "properties": {"v": {"type": "string"}, "c": {"type": "array", "items": {"$ref": "#"}}},
         "required": ["v", "c"]},
        [{"v": "a", "c": []}, {"v": "a", "c": [{"v": "b", "c": []}, {"v": "c", "c": [{"v": "", "c": []}]}]}],
        [{"v": "a"}, {"v": "a", "c": [{"v": "b"}]}, {"v": "a", "c": [{}]}],
    ),
    "a reference to a property": (
        {"type": "object", "properties": {"a": {"type": "object", "properties": {"x": {"$ref": "#/properties/b"}}},
                                          "b": {"type": "string", "maxLength": 2}}, "required": ["a", "b"]},
        [{"a": {"x": "ab"}, "b": "c"}],
        [{"a": {"x": "abc"}, "b": "c"}, {"a": {"x": 1}, "b": "c"}],
    ),
    "definitions": (
        {"type": "object", "properties": {"to": {"$ref": "#/$defs/city"}, "via": {"$ref": "#/definitions/city"}},
         "$defs": {"city": CITY}, "definitions": {"city": {"enum": ["Rome", "Bern"]}}, "required": ["to"]},
        [{"to": {"zip": "1"}}, {"to": {"zip": "1"}, "via": "Bern"}],
        [{"to": {}}, {"to": {"zip": 1}}, {"to": "Rome"}, {"to": {"zip": "1"}, "via": "Oslo"}, {}],
    ),
    "nothing but a reference": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"n": {"type": "integer"}},
                                              "required": ["n"], "additionalProperties": False}}},
        [{"n": 1}],
        [{}, {"n": "x"}, {"n": 1, "m": 1}],
    ),
    "draft 7": (
        {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a",
         "definitions": {"a": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}},
        [{"n": 1}],
        [{}, {"n": "x"}],
    ),
    "nothing but allOf": (
        {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                   {"properties": {"b": {"enum": ["x", "y"]}, "a": {"minimum": 2}}, "required": ["b"]}]},
        [{"a": 2, "b": "x"}],
        [{"a": 1, "b": "x"}, {"a": 2}, {"b": "x"}, {"a": 2, "b": "z"}],
    ),
    "allOf of members": (
        {"type": "object", "properties": {"e": {"allOf": [{"$ref": "#/$defs/e"}], "description": "one"},
                                          "o": {"allOf": [{"$ref": "#/$defs/o"}, {"required": ["q"]}]}},
         "required": ["e", "o"],
         "$defs": {"e": {"enum": ["x", "y"]}, "o": {"type": "object", "properties": {"q": {"type": "integer"}}}}},
        [{"e": "x", "o": {"q": 1}}],
        [{"e": "z", "o": {"q": 1}}, {"e": "x", "o": {}}, {"e": "x", "o": {"q": "1"}}, {"e": "x"}],
    ),
    "oneOf": (
        {"type": "object", "properties": {"v": {"oneOf": [{"type": "integer", "maximum": 9}, {"const": "none"}]}},
         "required": ["v"]},
        [{"v": 9}, {"v": "none"}],
        [{"v": 10}, {"v": True}, {"v": [1]}, {"v": "some"}],
    ),
    "oneOf as a whole": (
        {"type": "object", "oneOf": [
            {"properties": {"kind": {"const": "a"}, "n": {"type": "integer"}}, "required": ["kind", "n"]},
            {"properties": {"kind": {"const": "b"}, "s": {"type": "boolean"}}, "required": ["kind", "s"]}]},
        [{"kind": "a", "n": 1}, {"kind": "b", "s": True}],
        [{"kind": "a", "s": True}, {"kind": "b", "n": 1}, {"kind": "c"}, {}],
    ),
    "anyOf beside members": (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
         "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 2}],
        [{}, {"a": True}],
    ),
    "enum": (
        {"type": "object", "properties": {"e": {"enum": ["a b", "", "x\ny", 2, 1.5, True, None, [1, "z"],
                                                         {"k": [None]}]}},
         "required": ["e"]},
        [{"e": e} for e in ("a b", "", "x\ny", 2, 1.5, True, None, [1, "z"], {"k": [None]})],
        [{"e": e} for e in ("a", 3, False, [1], {"k": []}, {})],
    ),
    "enum of numbers in texts": (
        {"type": "object", "properties": {"e": {"enum": ["5", "null", 6]}}, "required": ["e"]},
        [{"e": "5"}, {"e": "null"}, {"e": 6}],
        [{"e": 7}, {"e": "x"}],
    ),
    "const": (
        {"type": "object", "properties": {"c": {"const": "it's \"q\" <b>"}, "d": {"const": {"a": [1]}}}},
        [{}, {"c": "it's \"q\" <b>"}, {"d": {"a": [1]}}],
        [{"c": "its"}, {"d": {"a": [2]}}],
    ),
    "enum of arguments": (
        {"enum": [{"a": 1}, {"a": 2, "b": "x"}]},
        [{"a": 1}, {"a": 2, "b": "x"}],
        [{}, {"a": 2}, {"a": 1, "b": "x"}],
    ),
    "nested arrays": (
        {"type": "object", "properties": {"m": {"type": "array", "items": {"type": "array",
                                                                           "items": {"type": "integer"}}}},
         "required": ["m"]},
        [{"m": []}, {"m": [[]]}, {"m": [[1, -2], [3]]}],
        [{"m": [1]}, {"m": [["a"]]}, {"m": {}}, {"m": [[[]]]}],
    ),
    "nested objects": (
        {"type": "object", "properties": {"o": {"type": "object", "properties": {
            "p": {"type": "object", "properties": {"q": {"type": "boolean"}}, "required": ["q"]}}, "required": ["p"]}},
         "required": ["o"]},
        [{"o": {"p": {"q": True}}}],
        [{"o": {}}, {"o": {"p": {}}}, {"o": {"p": {"q": 1}}}, {"o": {"p": {"q": True}, "z": 1}}],
    ),
    "odd names": (
        {"type": "object", "properties": {name: {"type": "integer"} for name in ODD}, "required": list(ODD)},
        [{name: i for i, name in enumerate(ODD)}],
        [{}, {name: i for i, name in enumerate(ODD[:-1])}, dict.fromkeys(ODD, "x")],
    ),
    "an odd name that may be missing": (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b c": {"type": "string"}}},
        [{}, {"a": 1}, {"b c": "x"}, {"a": 1, "b c": "x"}],
        [{"a": "x"}, {"d": 1}],
    ),
    "no members": ({"type": "object", "additionalProperties": False}, [{}], [{"a": 1}, {"a b": "x"}]),
    "an empty list of members": ({"type": "object", "properties": {}, "additionalProperties": False}, [{}], [{"a": 1}]),
    "any members": ({"type": "object"}, [{}, {"a": 1}, {"any_key": "x", "o": [1], "a b": None, "n-1": {"k": 2}}], []),
    "other members": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True},
        [{}, {"a": 1}, {"a": 1, "b": 2, "c d": ["x"]}, {"b": {"k": None}}],
        [{"a": "x"}],
    ),
    "other members of a type": (
        {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "integer"}},
        [{}, {"a": "x"}, {"a": "x", "b": 2}, {"c d": 3}],
        [{"b": [1]}, {"a": "x", "b": True}, {"b": {"k": 1}}],
    ),
    "required, not described": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b"]},
        [{"b": 1}, {"a": 1, "b": [2]}],
        [{}, {"a": 1}],
    ),
    "counted members": (
        {"type": "object", "properties": {n: {"type": "integer"} for n in "abc"}, "minProperties": 1,
         "maxProperties": 2, "additionalProperties": False},
        [{"a": 1}, {"c": 1}, {"a": 1, "c": 2}],
        [{}, {"a": 1, "b": 2, "c": 3}],
    ),
    "members by pattern": (
        {"type": "object", "properties": {"a": {"type": "boolean"}},
         "patternProperties": {"^n_": {"type": "integer"}, "^s": {"type": "array"}}, "additionalProperties": False},
        [{}, {"n_x": 1}, {"s": []}, {"a": True, "n_x": 1, "sx": [1]}],
        [{"n_x": True}, {"x": 1}, {"s": 1}, {"n_s": []}],
    ),
    "members by pattern, in a member": (
        {"type": "object", "properties": {"o": {"type": "object", "patternProperties": {"^n_": {"type": "integer"}},
                                                "additionalProperties": {"type": "boolean"}}}, "required": ["o"]},
        [{"o": {}}, {"o": {"n_x": 1}}, {"o": {"x": True}}, {"o": {"n_1": 1, "x": False}}],
        [{"o": {"n_x": True}}, {"o": {"x": 1}}, {"o": []}],
    ),
    "no items": (
        {"type": "object", "properties": {"l": {"type": "array", "maxItems": 0}}, "required": ["l"]},
        [{"l": []}],
        [{"l": [1]}, {}],
    ),
    "at most one item": (
        {"type": "object", "properties": {"l": {"type": "array", "items": {"type": "string"}, "maxItems": 1}},
         "required": ["l"]},
        [{"l": []}, {"l": ["a"]}],
        [{"l": ["a", "b"]}, {"l": [1]}],
    ),
    "exactly one item": (
        {"type": "object", "properties": {"l": {"type": "array", "minItems": 1, "maxItems": 1}}, "required": ["l"]},
        [{"l": [1]}, {"l": [[2]]}],
        [{"l": []}, {"l": [1, 2]}],
    ),
    "at least two items": (
        {"type": "object", "properties": {"l": {"type": "array", "items": {"type": "integer"}, "minItems": 2}},
         "required": ["l"]},
        [{"l": [1, 2]}, {"l": [1, 2, 3, 4]}],
        [{"l": [1]}, {"l": []}, {"l": [1, "a"]}],
    ),
    "first items": (
        {"type": "object", "properties": {"l": {
            "type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": {"type": "null"},
            "minItems": 1, "maxItems": 3}}, "required": ["l"]},
        [{"l": [1]}, {"l": [1, True]}, {"l": [1, True, None]}],
        [{"l": []}, {"l": [True]}, {"l": [1, 1]}, {"l": [1, True, 1]}, {"l": [1, True, None, None]}],
    ),
    "a row of fixed length": (
        {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {
            "l": {"type": "array", "items": [{"type": "integer"}, {"type": "string"}], "additionalItems": False}},
         "required": ["l"]},
        [{"l": []}, {"l": [1]}, {"l": [1, "a"]}],
        [{"l": ["a"]}, {"l": [1, "a", 2]}],
    ),
    "nullable": (
        {"type": "object", "properties": {"s": {"type": ["string", "null"], "maxLength": 3},
                                          "i": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                                          "o": {"oneOf": [{"type": "null"}, CITY]}}, "required": ["s", "i", "o"]},
        [{"s": None, "i": None, "o": None}, {"s": "ab", "i": 1, "o": {"zip": "x"}}],
        [{"s": "abcd", "i": 1, "o": None}, {"s": "a", "i": "b", "o": None}, {"s": "a", "i": 1, "o": {}}],
    ),
    "bounds of numbers": (
        {"type": "object", "properties": {"i": {"type": "integer", "minimum": -2, "exclusiveMaximum": 10},
                                          "n": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
                                          "m": {"type": "integer", "multipleOf": 3}}},
        [{"i": -2, "n": 1, "m": 9}, {"i": 9, "n": 0.5}, {"m": 0}],
        [{"i": -3}, {"i": 10}, {"n": 0}, {"n": 1.5}, {"m": 4}, {"i": 1.5}, {"i": True}],
    ),
    "a text or a large number": (
        {"type": "object", "properties": {"v": {"anyOf": [{"type": "string", "maxLength": 2},
                                                          {"type": "integer", "minimum": 10}]}}, "required": ["v"]},
        [{"v": "5"}, {"v": 50}, {"v": 500}, {"v": "ab"}, {"v": ""}],
        [{"v": "abc"}, {"v": [1]}],
    ),
    "a text or a list": (
        {"type": "object", "properties": {"v": {"type": ["string", "array"], "items": {"type": "integer"},
                                                "minItems": 1}}, "required": ["v"]},
        [{"v": "[x"}, {"v": [1, 2]}, {"v": '["a"]'}, {"v": "[]"}],
        [],
    ),
    "lengths and patterns of texts": (
        {"type": "object", "properties": {"l": {"type": "string", "minLength": 2, "maxLength": 3},
                                          "p": {"type": "string", "pattern": "^[A-Z]+-[0-9]{2}$"},
                                          "q": {"type": "string", "pattern": "ab", "maxLength": 4},
                                          "look": {"type": "string", "pattern": "^(?=x)x"},
                                          "u": {"type": "string", "format": "uri-reference"}}},
        [{"l": "é🙂"}, {"l": "abc"}, {"p": "DE-12"}, {"q": "xab"}, {"look": "anything"}, {"u": "/a?b#c"}],
        [{"l": "a"}, {"l": "abcd"}, {"p": "de-12"}, {"p": "DE-1"}, {"q": "ba"}, {"q": "aabbb"}, {"u": "a b"}],
    ),
    "null or a text that is longer": (
        {"type": "object", "properties": {"l": {"type": ["string", "null", "boolean"], "minLength": 6},
                                          "p": {"anyOf": [{"type": "string", "pattern": "^[a-z]+-"}, {"type": "null"}]},
                                          "e": {"anyOf": [{"enum": ["x", 7]}, {"type": "string", "minLength": 3}]}}},
        [{"l": None}, {"l": False}, {"l": "abcdef"}, {"p": None}, {"p": "x-1"}, {"e": 7}, {"e": "x"}, {"e": "abc"}],
        [{"l": "abc"}, {"p": "x"}, {"e": "ab"}],
    ),
    "a number or a text that is longer": (
        {"type": "object", "properties": {"v": {"type": ["string", "number", "array"], "minLength": 4}}},
        [{"v": 5}, {"v": [1]}, {"v": "abcd"}, {"v": 1.5}],
        [{"v": {"a": 1}}, {"v": None}],
    ),
    "texts of any kind": (
        {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]},
        [{"s": s} for s in ("", " x \n", "\n\na\n", "12", "null", "True", '{"a": [1]}', "<b>&</b>", "a\\n'b", "é漢🙂")],
        [{}],
    ),
    "tags in texts of lists": (
        {"type": "object", "properties": {"l": {"type": "array", "items": {"type": "string"}},
                                          "o": {"type": "object"}}},
        [{"l": ["</parameter>", "</arg_value>\n"], "o": {"k\"": "\n</parameter>\n'"}}],
        [],
    ),
}  # fmt: skip


SOME = ("a reference to the whole", "nothing but a reference", "nothing but allOf", "nullable")
WITH_TAGS = ("odd names", "tags in texts of lists")
"""Schemas with texts that a tokenizer reads as marks if these are special tokens."""
CASES = [
    (kind, form, schema)
    for kind in ("text", "special")
    for form in FORMATS
    for schema in SCHEMAS
    if schema in SOME
    or (kind == "text" and form in ("hermes", *OWN_SYNTAX))
    or (form in ("glm", "minimax") and schema not in WITH_TAGS)
]


@pytest.fixture(scope="module")
def vocabularies() -> Iterator[dict[str, Vocabulary]]:
    found = {"text": Vocabulary(special=False), "special": Vocabulary(special=True)}
    yield found
    for vocabulary in found.values():
        vocabulary.text.close()


def read_back(form: CallFormat, function: Function, text: str, pieces: list[str]) -> list[Any]:
    """The arguments of the calls in a text that arrives in pieces."""
    scanner = form.scanner(start=0, only_calls=True, functions={function.name: function})
    return [arguments for _, arguments in read_calls(scanner, pieces)]


def read_calls(scanner: CallScanner, pieces: list[str]) -> list[tuple[str, Any]]:
    parts = [part for piece in pieces for part in scanner.push(piece)] + scanner.flush(cut=False)
    calls: dict[int, list[str]] = {}
    for part in joined(parts):
        assert isinstance(part, CallPart), part
        found = calls.setdefault(part.index, ["", ""])
        found[0] += part.name
        found[1] += part.arguments
    return [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.quick_cover(1)
@pytest.mark.slow_except("text-hermes-a reference *", "text-pythonic-*", "text-qwen3-*")
@pytest.mark.parametrize(("kind", "name", "schema"), CASES)
def test_arguments_match_the_schema_and_read_back(
    vocabularies: dict[str, Vocabulary], kind: str, name: str, schema: str
) -> None:
    vocabulary, form, (parameters, good, bad) = vocabularies[kind], FORMATS[name], SCHEMAS[schema]
    function = Function("f", None, parameters)
    grammar = form.grammar(Wanted([function], required=True), vocabulary.spell)
    for arguments in good:
        text = form.written([("f", json.dumps(arguments, ensure_ascii=False))])
        assert vocabulary.accepts(grammar, text), text
        for pieces in ([text], list(text), [text[: len(text) // 2], text[len(text) // 2 :]]):
            assert read_back(form, function, text, pieces) == [arguments]
    for arguments in bad:
        text = form.written([("f", json.dumps(arguments, ensure_ascii=False))])
        if read_back(form, function, text, [text]) == [arguments]:  # else a text that is no JSON became valid arguments
            assert not vocabulary.accepts(grammar, text), text


def test_the_right_values_are_those_of_json_schema() -> None:
    """Exceptions: objects that list members get no others, and patterns with look-around are ignored."""
    for name, (parameters, good, _) in SCHEMAS.items():
        kind = jsonschema.validators.validator_for(parameters, jsonschema.Draft202012Validator)
        for arguments in good if name != "lengths and patterns of texts" else []:
            assert kind(parameters).is_valid(arguments), (name, arguments)


@pytest.mark.parametrize("name", FORMATS)
def test_what_cannot_be_followed_is_refused_in_every_format(vocabularies: dict[str, Vocabulary], name: str) -> None:
    vocabulary = vocabularies["text"]
    for parameters in ({"properties": {"a": {"$ref": "#/$defs/none"}}}, {"$ref": "http://else.where/schema"},
                       {"allOf": [{"required": ["a"]}, {"properties": {"a": False}}]}):  # fmt: skip
        try:
            grammar = FORMATS[name].grammar(Wanted([Function("f", None, parameters)], required=True), vocabulary.spell)
        except Unenforceable:
            continue
        with pytest.raises(AssertionError, match="nsatisfiable"):
            vocabulary.accepts(grammar, "")


def test_alternatives_of_several_schemas_are_combined(vocabularies: dict[str, Vocabulary]) -> None:
    kinds = [{"required": [n]} for n in "abc"]
    parameters = {
        "type": "object", "properties": {n: {"type": "integer"} for n in "abcdef"},
        "allOf": [{"anyOf": kinds}, {"anyOf": [{"required": [n]} for n in "def"]}],
    }  # fmt: skip
    function = Function("f", None, parameters)
    for name in ("hermes", "pythonic", "seed-oss"):
        accepts = accepted(vocabularies["text"], FORMATS[name], function)
        assert all(accepts({first: 1, second: 2}) for first, second in itertools.product("abc", "def"))
        assert not accepts({"a": 1, "b": 2})


def test_beyond_a_bound_alternatives_are_ignored(vocabularies: dict[str, Vocabulary]) -> None:
    """In formats that are not JSON, the grammar then accepts too much."""
    several = {"anyOf": [{"required": [n]} for n in "abcd"]}
    parameters = {"properties": {n: {"type": "integer"} for n in "abcd"}, "allOf": [dict(several) for _ in range(7)]}
    function = Function("f", None, parameters)
    for name in ("pythonic", "glm"):
        accepts = accepted(vocabularies["text"], FORMATS[name], function)
        assert accepts({"a": 1, "d": 2}) and not accepts({}) and not accepts({"a": "x"})


def test_patterns_of_names_may_overlap(vocabularies: dict[str, Vocabulary]) -> None:
    """In formats that are not JSON; the library refuses them in JSON."""
    parameters = {
        "type": "object",
        "patternProperties": {"^n": {"type": "integer"}, "s$": {"type": "integer", "minimum": 5}, "x": {"maximum": 9}},
        "additionalProperties": False,
    }
    for name in ("pythonic", "glm"):
        accepts = accepted(vocabularies["text"], FORMATS[name], Function("f", None, parameters))
        assert accepts({"n": 1, "ns": 5, "nxs": 7}), name
        assert not any(map(accepts, ({"ns": 4}, {"nxs": 10}, {"nx": 10}, {"a": 1}))), name


VALUES: dict[str, Any] = {
    "text": {"type": "string"}, "n": {"type": "integer"}, "x": {"type": "number"}, "b": {"type": "boolean"},
    "l": {"type": "array", "items": {"type": "string"}}, "o": {"type": "object"}, "u": {"type": ["string", "null"]},
    "e": {"enum": ["c", "f"]},
}  # fmt: skip
TAUGHT = (Function("get_weather", "Weather", {"type": "object", "properties": VALUES}), Function("now", "Time", {}))
TAUGHT_CALLS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "one": [("get_weather", {"text": "Paris"})],
    "no arguments": [("now", {})],
    "lines": [("get_weather", {"text": "a\nb\n\nc"})],
    "signs": [("get_weather", {"text": 'it\'s "q" \\ <b> & </b> é 漢 🙂'})],
    "white space": [("get_weather", {"text": " x \n"})],
    "kinds": [
        ("get_weather", {"n": 3, "x": 1.5, "b": True, "l": ["it's", 'b"'], "o": {"k": [1, {"z": None}]}, "e": "c"})
    ],
    "null": [("get_weather", {"b": False, "u": None})],
    "two": [("get_weather", {"text": "a"}), ("now", {})],
    "three": [("now", {}), ("get_weather", {"text": "a", "n": 1}), ("now", {})],
    "texts that look like JSON": [("get_weather", {"text": '{"a": [1]}', "u": "12"})],
    "an empty text": [("get_weather", {"text": ""})],
}


@pytest.mark.parametrize(
    "source", [*TEMPLATES.values(), *VARIANTS.values()], ids=[*TEMPLATES, *map("{} again".format, VARIANTS)]
)
def test_calls_as_the_template_writes_them(vocabularies: dict[str, Vocabulary], source: str) -> None:
    """A model was taught to answer as its template shows earlier answers."""
    template = ChatTemplate(source)
    dialect = dialect_of(template)
    tools, user = [function.as_tool() for function in TAUGHT], [{"role": "user", "content": "hi"}]
    grammars = [
        (kind, dialect.format.grammar(Wanted(TAUGHT, required=required), vocabularies[kind].spell))
        for kind, required in itertools.product(("text", "special"), (False, True))
    ]
    for case, calls in TAUGHT_CALLS.items():
        if dialect.single_calls and len(calls) > 1:
            continue
        given = [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ]
        answer = {"role": "assistant", "content": "", "tool_calls": given}
        prompt = template.render(dialect.messages(user), tools=tools)
        whole = template.render(dialect.messages([*user, answer]), tools=tools, add_generation_prompt=False)
        text = whole.removeprefix(prompt).removesuffix("\n")
        assert text != whole
        functions = {function.name: function for function in TAUGHT}
        for pieces in ([text], list(text)):
            scanner = dialect.format.scanner(start=0, only_calls=False, functions=functions)
            assert read_calls(scanner, pieces) == calls, case
        for kind, grammar in grammars:
            assert vocabularies[kind].accepts(grammar, text), (case, kind, grammar)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(schema=extended(SCHEMAS_AT_RANDOM), values=st.lists(members(VALUES_AT_RANDOM), min_size=1, max_size=4))
def test_all_formats_take_the_same_arguments(
    vocabularies: dict[str, Vocabulary], schema: dict[str, Any], values: list[dict[str, Any]]
) -> None:
    """As in JSON, except for a text that is read as another valid value."""
    function, vocabulary = Function("f", None, schema), vocabularies["text"]
    json_form = FORMATS["hermes"]
    try:
        wanted = Wanted([function], required=True)
        grammars = {name: FORMATS[name].grammar(wanted, vocabulary.spell) for name in ("hermes", *OWN_SYNTAX)}
    except Unenforceable:
        assume(False)
    assume(not compile_grammar(vocabulary.library, grammars["hermes"])[1])
    for value in values:
        given_json = json.dumps(value, ensure_ascii=False)
        expected = vocabulary.accepts(grammars["hermes"], json_form.written([("f", given_json)]))
        for name in OWN_SYNTAX:
            text = FORMATS[name].written([("f", given_json)])
            found = read_back(FORMATS[name], function, text, list(text))
            assert vocabulary.accepts(grammars[name], text) is expected or found != [value], (name, text)
            assert not expected or found == [value] or function.shapes.accepts(found[0], (function.shapes.root,))


def accepted(vocabulary: Vocabulary, form: CallFormat, function: Function) -> Callable[[Any], bool]:
    """Whether a call with some arguments is an answer."""
    grammar = form.grammar(Wanted([function], required=True), vocabulary.spell)
    return lambda arguments: vocabulary.accepts(grammar, form.written([(function.name, json.dumps(arguments))]))
