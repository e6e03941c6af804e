r"""Patterns of schemas as lexemes: they match anywhere in a text, as `re.search` does."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.text.schema.canonical_form import Document
from router.text.schema.logic import Proofs
from router.text.schema.patterns import has_looks, matches, searched

from ...examples import examples

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
