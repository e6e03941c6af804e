"""Grammars, compiled over the tiny model's bytes: the texts that they accept and refuse."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.wire.sampling_params import MAX_GRAMMAR_CHARS
from router.text.answer_grammar import (
    choice_grammar,
    free_grammar,
    json_grammar,
    regex_grammar,
)

from ...examples import examples
from ..answers import checked, is_answer


def accepts(grammar: str, text: str) -> bool:
    return is_answer(checked(grammar), text)


PERSON = {
    "$defs": {"age": {"type": "integer", "minimum": 0}},
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": r"^[A-Z][a-z]*$"}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "Bo", "age": 7}', True),
        ('{"name":"Bo","age":7}', True),
        ('{\n    "name": "Bo",\n    "age": 7\n}', True),
        ('{"name": "bo", "age": 7}', False),
        ('{"name": "Bo", "age": -7}', False),
        ('{"name": "Bo"}', False),
        ('{"name": "Bo", "age": 7} ', False),
        ('{\n\n\n\n"name": "Bo", "age": 7}', False),  # a model that may write blanks might write nothing else
    ],
)
def test_json_of_a_schema(text: str, expected: bool) -> None:
    assert accepts(json_grammar(PERSON), text) is expected


@pytest.mark.parametrize("text", ['{"a": [1, null, {"b": "\\né"}], "": 1.5e3}', "{}", '{"a":true}'])
def test_any_object(text: str) -> None:
    assert accepts(json_grammar({"type": "object"}), text)
    assert not accepts(json_grammar({"type": "object"}), f"[{text}]")


def test_a_client_does_not_set_the_librarys_own_options() -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_pattern": "[ ]+", "lenient": True}}
    assert not accepts(json_grammar(schema), "{         }")


@pytest.mark.parametrize(
    "choice", ["yes", 'say "hi"', "back\\slash", "two\nlines", "été", "/.*/", "%json {}", "a|b", "\x7f\0\x1b"]
)
def test_a_choice_is_taken_as_it_is(choice: str) -> None:
    grammar = choice_grammar(["no", choice])
    assert accepts(grammar, choice) and accepts(grammar, "no")
    assert not accepts(grammar, choice + "x") and not accepts(grammar, "a")


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        (r"\d{4}-\d\d", "2026-11", True),
        (r"\d{4}", "٢٠٢٦", False),  # digits, but not ASCII digits
        (r"[\d.]+", "1.5", True),
        (r"[^\s]{3}", "a b", False),
        (r"\w+\\d", r"ab\d", True),
        (r"\w+", "é", False),
        (r"a/b", "a/b", True),
        (r"(yes|no)!?", "no!", True),
        (r"(yes|no)!?", "no!!", False),
    ],
)
def test_a_regular_expression_matches_the_whole_answer(pattern: str, text: str, expected: bool) -> None:
    assert accepts(regex_grammar(pattern), text) is expected


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        ('?start: "a" | "b"\n', ["a", "b"]),
        ('// start\n\n?!start: "a"', ["a"]),
        ('!?start.2: A | b\nA.-1: "a"\n?b.3: "b" -> c', ["a", "b"]),
        ('start: "x.1: y" /a.2:/', ["x.1: ya.2:"]),
        ('# root ::= "a"\nstart: "b"', ["b"]),
        ('%llguidance {}\nstart: _x\n_x: "::="', ["::="]),
        ('start ::= "y"\nroot ::= start "!"', ["y!"]),
        ('# start: "b"\nroot ::= "a"', ["a"]),
    ],
)
def test_the_form_of_a_grammar_is_found(grammar: str, texts: list[str]) -> None:
    written = checked(free_grammar(grammar))
    assert all(is_answer(written, text) for text in texts) and not is_answer(written, "c")


@pytest.mark.parametrize("grammar", ['start: "ab" N+\nN: /[0-9]/', 'root ::= "ab" n\nn ::= [0-9] | [0-9] n'])
def test_rules_of_lark_and_of_gbnf(grammar: str) -> None:
    assert accepts(free_grammar(grammar), "ab12") and not accepts(free_grammar(grammar), "ab")


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: json_grammar({"type": "strng"}), "Invalid type: strng"),
        (lambda: json_grammar({"$ref": "#/$defs/none"}), "does not exist"),
        (lambda: json_grammar({"$ref": "http://127.0.0.1:1/schema"}), "are not fetched"),
        (lambda: json_grammar({"not": {"multipleOf": 3}}), "#/not: the opposite of `multipleOf`"),
        (lambda: json_grammar(False), "Unsatisfiable"),
        (lambda: regex_grammar("(a"), "unclosed group"),
        (lambda: free_grammar("start: nothing"), 'unknown name: "nothing"'),
        (lambda: free_grammar("root ::= nothing"), "nothing"),
        (lambda: free_grammar("::= ((("), "line 1: expected a rule"),
        (lambda: free_grammar('root ::= "a" (\n'), "line 1: `(` without `)`"),
        (lambda: free_grammar('x ::= "a"'), "the rule `root` is not defined"),
        (lambda: regex_grammar("a*+a"), "possessive"),
        (lambda: regex_grammar(r"(a)\1"), "backreferences"),
        (lambda: choice_grammar(["x" * MAX_GRAMMAR_CHARS]), f"the maximum is {MAX_GRAMMAR_CHARS:,}"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(make: Callable[[], str], problem: str) -> None:
    with pytest.raises(ValueError) as error:
        checked(make())
    assert problem in str(error.value)
    assert not str(error.value).startswith("at 1(8): failed"), "that is where it stands in our rules"


def test_a_schema_nested_deeply_is_refused_and_not_a_crash() -> None:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(240):
        deep = {"type": "object", "properties": {"a": deep}}
    with pytest.raises(ValueError, match="nested deeper than 64"):
        checked(json_grammar(json.loads(json.dumps(deep))))


MEMBERS = st.sampled_from(
    [*"]^-&|~[a0_", "a-c", "+--", r"\]", r"\d", r"\W", r"\S", r"\b", r"\x41", r"\n", r"\101", "&&", "--", "||", "~~"]
)
SETS = st.builds("[{}{}]".format, st.sampled_from(["", "^"]), st.lists(MEMBERS, min_size=1, max_size=4).map("".join))
ATOMS = st.one_of(
    SETS,
    st.sampled_from(
        ["a", "b", "]", "}", "{", "{a}", "{,}", ".", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"\{", r"\<", r"\0", "/"]
    ),
    st.sampled_from(["(?:a|b)", "(a)", "(?P<n>b)", "(?#[)", "(?i:a)", "(?s:.)", "|", r"\012", r"\u00e9", "\u00e9"]),
)
PATTERNS = st.builds(
    "{}{}{}".format,
    st.sampled_from(["", "", "", "^", "(?s)", "(?a)", r"\A"]),
    st.lists(
        st.tuples(ATOMS, st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{,1}", "{1,}", "*?", "{1,2}?"])),
        max_size=4,
    ).map(lambda parts: "".join(map("".join, parts))),
    st.sampled_from(["", "", "$", r"\Z"]),
)
WORDS = st.lists(st.text("ab]^-&|~[{}0_/<, \n\r\0A\u00e9\u0663+*", max_size=4), min_size=6, max_size=12)


@settings(max_examples=examples(100), deadline=None)
@given(PATTERNS, WORDS)
def test_regular_expressions_match_what_python_says(pattern: str, texts: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sets in sets, which may come
        try:
            expected = re.compile(pattern, re.ASCII)
        except (re.error, ValueError):
            return
    try:
        grammar = checked(regex_grammar(pattern))
    except ValueError as error:  # of what cannot be a whole text, and of `$` within a text
        assert not any(expected.fullmatch(text) for text in texts) or "lookarounds" in str(error), (pattern, error)
        return
    for text in texts:
        assert is_answer(grammar, text) is bool(expected.fullmatch(text)), (pattern, text)
