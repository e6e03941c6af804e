"""Patterns of JSON Schema: in the dialect of the library, as lexemes, and those of all texts but some."""

from __future__ import annotations

import json
import random
import re
import time
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.grammar.vocabulary import compile_grammar
from common.model_files.resolve import resolve_model
from router.text.answer_grammar import json_grammar
from router.text.schema.canonical_form import Document
from router.text.schema.logic import Proofs
from router.text.schema.patterns import (
    MAX_CHARS,
    beginning_of,
    has_looks,
    matches,
    none_begins,
    none_of,
    portable,
    searched,
    texts_of,
)

from ....examples import examples
from ....random_documents import Documents
from ...answers import checked, is_answer

TEXT = {"type": "string"}
MEMBERS = st.sampled_from(["[", "-", "&", "~", "^", "a", "b", "*", r"\]", r"\[", r"\-", r"\d", "0", "a-b", "+-"])
CLASSES = st.builds("[{}{}]".format, st.sampled_from(["", "^"]), st.lists(MEMBERS, min_size=1, max_size=6).map("".join))
TEXTS = st.text("[]-&~^ab*+,0", max_size=2)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^[[a-z]*[-]?[a-z]*]*$", r"^[\[a-z]*[\-]?[a-z]*]*$"),
        ("[a&&b]", r"[a\&\&b]"),
        ("[+--]", r"[+-\-]"),
        ("[--a]", r"[\--a]"),
        ("[a-]", r"[a\-]"),
        (r"[\w-.]", r"[\w\-.]"),
        (r"[a-\d]", r"[a\-\d]"),
        (r"[\p{L}-x]", r"[\p{L}\-x]"),
        (r"\u{0001F600}[\x{0001F600}]", r"\u{0001F600}[\x{0001F600}]"),
        (r"\p{Cyrillic}[\p{Cyrillic}]", r"\p{Cyrillic}[\p{Cyrillic}]"),
        (r"[\u0041-\u0043]", r"[\u0041-\u0043]"),
        ("[^]a]", r"[^\]a]"),
        ("[[:alpha:]]", r"[\[:alpha:]]"),
        (r"[\b]", r"[\x08]"),
        (r"\<a\>\b", r"<a>\b"),
        (r"a.b\.c[.]", r"a[^\n\r]b\.c[.]"),
        (r"\[a.", r"\[a[^\n\r]"),
        ("(?s).[[]", r"(?s).[\[]"),
        ("(?x)[ ]", r"(?x)[\x20]"),
        ("{a}{2}x{", r"\{a}{2}x\{"),
        ("a{,2}", "a{,2}"),
        (r"\0[\cA]", r"\x{0}[\x{1}]"),
        (r"[\ud83d\ude00-\ud83d\ude02]", r"[\x{1f600}-\x{1f602}]"),
        ("\\\u00e9", "\u00e9"),
        ("[a", "[a"),
        ("^[a-z0-9_]+$", "^[a-z0-9_]+$"),
        ("a\\", "a\\"),
    ],
)
def test_what_is_written(pattern: str, expected: str) -> None:
    assert portable(pattern) == expected
    assert portable(expected) == expected  # once is enough


@settings(max_examples=examples(60), deadline=None)
@given(CLASSES, st.lists(TEXTS, min_size=1, max_size=6))
def test_a_class_matches_what_python_says(inside: str, texts: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # that sets in sets may come
        try:
            expected = re.compile(f"^{inside}{{1,2}}$", re.ASCII)
        except re.error:  # a range that runs backwards
            return
    grammar = json_grammar({"type": "string", "pattern": f"^{inside}{{1,2}}$"})
    for text in texts:
        assert is_answer(grammar, json.dumps(text)) is bool(expected.fullmatch(text)), (inside, text)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("^[[a-z]*[-]?[a-z]*]*$", ["", "[a-b]", "]]"], ["a*", "*", "a-b-c"]),
        (r"^[\w-.]$", ["a", "-", "."], ["/"]),
        ("^.$", ["x", '"'], ["\n", "\r", ""]),
    ],
)
def test_texts_of_a_pattern(pattern: str, matching: list[str], others: list[str]) -> None:
    grammar = json_grammar({**TEXT, "pattern": pattern})
    assert all(is_answer(grammar, json.dumps(text)) for text in matching)
    assert not any(is_answer(grammar, json.dumps(text)) for text in others)


def test_names_of_members() -> None:
    grammar = json_grammar({"type": "object", "patternProperties": {"^[&&--0]$": TEXT}, "additionalProperties": False})
    assert all(is_answer(grammar, json.dumps({name: ""})) for name in "&+,-0")
    assert not any(is_answer(grammar, json.dumps({name: ""})) for name in "1a./")


def test_two_ways_to_write_one_pattern_keep_both_schemas() -> None:
    wanted = {"^[a-]$": {"minimum": 2}, r"^[a\-]$": {"maximum": 3}}
    grammar = json_grammar({"type": "object", "patternProperties": wanted, "additionalProperties": False})
    assert is_answer(grammar, '{"a":2}') and is_answer(grammar, '{"-":3}')
    assert not is_answer(grammar, '{"a":1}') and not is_answer(grammar, '{"a":4}')


def test_a_pattern_of_which_all_names_are_used_allows_no_further_member() -> None:
    """A comma after them would be the end of the answer: no name could follow."""
    wanted = {"^a$": {"minimum": 2}, "^(a|b)$": {"maximum": 9}}
    schema = {"type": "object", "properties": {"a": {"enum": [1, 4, 10]}}, "required": ["a", "b"]}
    grammar = json_grammar({**schema, "patternProperties": {**wanted, "^c": {"type": "null"}}})
    assert is_answer(grammar, '{"a":4,"b":9}') and is_answer(grammar, '{"a":4,"b":"x","c":null}')
    assert not any(is_answer(grammar, f'{{"a":{a},"b":{b}}}') for a, b in ((1, 9), (10, 9), (4, 10)))
    documents = Documents(resolve_model("tiny-random"))
    matcher, _ = compile_grammar(documents.vocabulary, json_grammar({**schema, "patternProperties": wanted}))
    for seed in range(20):
        assert documents.draw(matcher, random.Random(seed)) is not None  # or ValueError: nothing can follow


@pytest.mark.parametrize(
    ("name", "matching", "others"),
    [
        (
            "uri-reference",
            ["", "a/b", "//h:80/x", "?q", "#f", "a%20b", "x:y@z", "http://[::1]/a?b#c", "//[v1.x]"],
            ["://", "a b", "%zz", "1:x", "a<b", "[::1]", "//[:::]", "\u00e9"],
        ),
        ("iri", ["http://\u00e9.fr/\u00fc?q#f", "a:", "urn:x:y"], ["not-an-iri", "", "a b:", "x:%1", "//a"]),
        ("iri-reference", ["\u00e9", "//\u00e9/", ""], ["<", "\u00e9 "]),
        (
            "uri-template",
            ["", "http://e.com/{a}{?b,c*}{/d:3}", "{x.y}", "\u00e9"],
            ["x/{", "{}", "a b", "{a:0}", "{=a}"],
        ),
        ("json-pointer", ["", "/", "/a/~0~1", "//"], ["a", "/~2", "/~"]),
        ("relative-json-pointer", ["0", "1/a", "0#", "24/b"], ["01", "-1", "/a", "0#/a", "2+1/b"]),
    ],
)
def test_texts_of_a_format(name: str, matching: list[str], others: list[str]) -> None:
    grammar = json_grammar({"format": name})
    assert all(is_answer(grammar, json.dumps(text, ensure_ascii=False)) for text in matching)
    assert not any(is_answer(grammar, json.dumps(text, ensure_ascii=False)) for text in others)
    assert is_answer(grammar, "5")  # which is no text


def test_a_format_beside_other_keywords() -> None:
    grammar = json_grammar({**TEXT, "format": "iri", "pattern": "x$", "allOf": [{"minLength": 4}]})
    assert is_answer(grammar, '"a:yx"') and not any(is_answer(grammar, f'"{text}"') for text in ("a:x", "a:yy", "abyx"))
    with pytest.raises(ValueError, match="format"):
        checked(json_grammar({**TEXT, "format": ["iri"]}))


BRANCH = st.tuples(
    st.sampled_from(["", "^"]),
    st.sampled_from(["a", "b+", "[^a]", "(a|b)", "a{2}", r"\/", r"\$", ""]),
    st.sampled_from(["", "$"]),
).map("".join)


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(pattern=st.lists(BRANCH, min_size=1, max_size=3).map("|".join), text=st.text("ab/$", max_size=4))
def test_a_pattern_matches_anywhere(pattern: str, text: str) -> None:
    assert matches(pattern, text) is (re.search(pattern, text) is not None)


@pytest.mark.parametrize("pattern", ["(?=a)b", "(?!a)", "(?<=a)b", r"(a)\1", r"(?<n>a)\k<n>"])
def test_looks_cannot_be_expressed(pattern: str) -> None:
    assert has_looks(pattern) and not searched(pattern) and not matches(pattern, "ab")


@pytest.mark.parametrize("pattern", [r"\\1", "[(?=a)]", r"\(?=", "(?:a)", "[$^]"])
def test_what_only_resembles_looks_can(pattern: str) -> None:
    assert not has_looks(pattern) and searched(pattern)


def test_an_anchor_inside_cannot_be_expressed() -> None:
    assert not searched("(^a|b)c") and not searched("a$b")


@pytest.mark.slow
def test_a_long_pattern_takes_linear_time() -> None:
    """Of CPU time: 25 s for the same brackets if each were looked at up to the end of the pattern."""
    begin = time.process_time()
    for pattern in ("[" * 200_000, "[" * 200_000 + "\\", "(" * 200_000):
        searched(pattern)
    assert time.process_time() - begin < 10


def test_an_array_of_any_items_is_possible() -> None:
    """Of a schema that says nothing of its items, whichever type is looked at first."""
    proofs = Proofs(Document(True))
    assert not proofs._no_array([], 0)
    assert not proofs.is_impossible({"type": "array", "minItems": 1, "maxItems": 1})


WORDS = st.lists(st.text("ab]^-\n", max_size=4), min_size=1, max_size=4)


@given(WORDS, st.text("ab]^-\n", max_size=5))
def test_all_texts_but_some(words: list[str], text: str) -> None:
    assert bool(re.fullmatch(none_of(words), text)) is (text not in words)


@given(WORDS.filter(lambda words: "" not in words), st.text("ab]^-\n", max_size=5))
def test_all_beginnings_but_some(words: list[str], text: str) -> None:
    assert bool(re.fullmatch(none_begins(words), text)) is not text.startswith(tuple(words))


def test_too_much_is_not_left_out() -> None:
    with pytest.raises(ValueError, match="more than 4,096"):
        none_of(["x" * MAX_CHARS])
    with pytest.raises(ValueError, match="every text"):
        none_begins([""])


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^(a|b-c)$", (["a", "b-c"], True)),
        ("^(?:a)$", (["a"], True)),
        (r"^a\.b", (["a.b"], False)),
        (r"^a\$", (["a$"], False)),
        ("^a|b$", None),
        ("^a.b$", None),
        (r"^(a\|b)$", None),
        ("^(a)(b)$", None),
        ("a", None),
        (r"^\d$", None),
        (1, None),
    ],
)
def test_texts_of_simple_patterns(pattern: object, expected: object) -> None:
    assert texts_of(pattern) == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^abc?", "ab"),
        (r"^https?://.+$", "http"),
        (r"^\./.+$", "./"),
        (r"^a\.?b", "a"),
        ("^ab+", "ab"),
        ("^a{2}", ""),
        ("^a|^b", ""),
        ("^(a)", ""),
        ("b", ""),
        (None, ""),
    ],
)
def test_beginnings_of_patterns(pattern: object, expected: str) -> None:
    assert beginning_of(pattern) == expected
