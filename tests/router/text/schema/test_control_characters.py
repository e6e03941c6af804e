r"""Control characters that a schema demands are part of its answers, which spell them `\u00XX`."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from router.text.answer_grammar import json_grammar
from router.text.schema.keywords import Unenforceable
from router.text.schema.patterns import demands_controls

from ...answers import is_answer

ALL = [*map(chr, range(0x20)), "\x7f"]
OPEN = {
    "properties": {"a": {"type": "integer"}, "c": {"const": "\x01"}},
    "required": ["z"],
    "additionalProperties": True,
}


def spelled(value: Any) -> str:
    """JSON text, in which DEL is escaped as well."""
    return json.dumps(value).replace("\x7f", "\\u007f")


@pytest.mark.slow_except(*(f"{ord(character):02x}" for character in "\0\b\t\n\f\r\x1b\x1f\x7f"))
@pytest.mark.parametrize("character", ALL, ids=lambda character: f"{ord(character):02x}")
def test_no_control_character_vanishes(character: str) -> None:
    with_it, without = f"a{character}b", "ab"
    escape = rf"\x{ord(character):02x}"
    for schema in (
        {"const": with_it},
        {"enum": [with_it, 1]},
        {"type": "string", "pattern": f"^a{character}b$"},
        {"type": "string", "pattern": f"^a{escape}b$"},
        {"type": "string", "pattern": f"^a[{escape}]b$"},
        {"type": "string", "maxLength": 3, "pattern": f"^a\\u{ord(character):04x}b$"},
        {"allOf": [{"type": "string"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"const": with_it}}},
    ):
        grammar = json_grammar(schema)
        assert is_answer(grammar, spelled(with_it)), schema
        assert not is_answer(grammar, spelled(without)), schema


@pytest.mark.parametrize("character", ["\n", "\0", "\x1b", "\x7f"])
def test_inside_other_values(character: str) -> None:
    for schema, right, wrong in (
        ({"const": {"k": [f"a{character}"]}}, {"k": [f"a{character}"]}, {"k": ["a"]}),
        ({"type": "array", "items": {"enum": [f"a{character}"]}}, [f"a{character}"], ["a"]),
        ({"patternProperties": {f"^a{character}$": {}}, "additionalProperties": False}, {f"a{character}": 1}, {"a": 1}),
        ({"properties": {"p": {"const": character}}, "required": ["p"]}, {"p": character}, {"p": ""}),
    ):
        grammar = json_grammar(schema)
        assert is_answer(grammar, spelled(right)) and not is_answer(grammar, spelled(wrong)), schema


@pytest.mark.parametrize("character", ["\n", "\0", "\x1b"])
def test_in_the_name_of_a_member(character: str) -> None:
    grammar = json_grammar({"properties": {f"a{character}": {"type": "integer"}}, "required": [f"a{character}"]})
    assert is_answer(grammar, json.dumps({f"a{character}": 1})) and not is_answer(grammar, '{"a":1}')


def test_del_in_the_name_of_a_member_is_no_escape() -> None:
    grammar = json_grammar({"properties": {"a\x7f": True}, "required": ["a\x7f"]})
    assert is_answer(grammar, '{"a\x7f":1}') and not is_answer(grammar, '{"a":1}')


def test_other_schemas_have_no_such_escapes() -> None:
    """A model that writes `caf\\u00e9` would be led to `\\u00` and a control character."""
    for schema in ({"type": "string"}, {"type": "string", "pattern": r"^[\x00-\x7f]*$"}, {"pattern": r"^[^\x00]*$"}):
        assert not is_answer(json_grammar(schema), r'"\u0001"')
        assert is_answer(json_grammar(schema), r'"a\n"')


def test_no_member_of_an_open_object_comes_twice() -> None:
    grammar = json_grammar(OPEN)
    assert is_answer(grammar, '{"a":1,"z":1}') and is_answer(grammar, '{"z":1,"b":2}')
    assert not is_answer(grammar, r'{"z":1,"\u0061":"x"}') and not is_answer(grammar, '{"z":1,"a":"x"}')
    with pytest.raises(Unenforceable, match="u00XX"):
        json_grammar({**OPEN, "patternProperties": {"^q": True}})
    with pytest.raises(Unenforceable, match="4,096 characters"):
        json_grammar({**OPEN, "required": ["x" * 5000]})


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"\x01", True), (r"\0", True), (r"\cA", True), (r"\v", True), ("\x7f", True), (r"[\x00-\x1f]", True),
        (r"[a\x1b]", True), (r"[^\x01-\u{10ffff}]", True), (r"\u{1}", True), (r"\001", True),
        (r"\n\t\r\f[\b]", False), (r"[^\x00-\x1f]", False), (r"[\x00-\x7f]", False), (r"\s\S.\d", False),
        (r"[^\s\x00]", False), (r"\ud83d\ude00", False), (r"\b\B\1", False), (r"[\x00", False), ("^$", False),
    ],
)  # fmt: skip
def test_patterns_that_demand_controls(pattern: str, expected: bool) -> None:
    assert demands_controls(pattern) is expected


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ('^[^"]*$', ["", "a\n", "\\", "\t/"], ['"', 'a"b']),
        (r"^[^\\]*$", ["", 'a"\n'], ["\\", "a\\b"]),
        (r'^[^"\\]+$', ["a\n\r"], ['"', "\\", ""]),
        (r'^[^"\n]$', ["\r", "\\"], ["\n", '"']),
        (r"^[\x00-\x1f]$", ["\n", "\x01", "\x1f"], ['"', "\\", " "]),
        (r"^[\x00-\x1f\"]$", ["\n", '"'], ["\\", " "]),
        (r"^[^\x20-\uffff]$", ["\n", "\t"], ['"', "\\", " "]),
        ("^[^a]$", ['"', "\\", "\n"], ["a"]),
        (r"^[\s\S]\S.$", ['"\\"', "\n\\\\"], ['"\n"']),
    ],
)
def test_sets_of_control_characters_have_no_quotes(pattern: str, matching: list[str], others: list[str]) -> None:
    grammar = json_grammar({"type": "string", "pattern": pattern})
    assert [text for text in matching if not is_answer(grammar, spelled(text))] == []
    assert [text for text in others if is_answer(grammar, spelled(text))] == []
    assert all(re.search(pattern, text) for text in matching) and not any(re.search(pattern, text) for text in others)


def test_quotes_that_other_keywords_leave_out() -> None:
    assert not is_answer(json_grammar({"type": "string", "not": {"const": '"'}}), r'"\""')
    for schema in ({"patternProperties": {'^[^"]$': True}}, {"propertyNames": {"pattern": '^[^"]$'}}):
        grammar = json_grammar({"type": "object", "additionalProperties": False, **schema})
        assert is_answer(grammar, '{"a":1}') is ("patternProperties" in schema)
        assert not is_answer(grammar, r'{"\"":1}')
    both = {'^[^"]$': {"minimum": 2}, r'^[^\x00"]$': {"maximum": 3}}
    grammar = json_grammar({"type": "object", "patternProperties": both, "additionalProperties": False})
    assert is_answer(grammar, '{"a":2}') and not is_answer(grammar, '{"a":1}') and not is_answer(grammar, '{"a":4}')
