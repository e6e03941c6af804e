"""Patterns for all texts but some, and what simple patterns say."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.schema.patterns import MAX_CHARS, beginning_of, none_begins, none_of, texts_of

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
