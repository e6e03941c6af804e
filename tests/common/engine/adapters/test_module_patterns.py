"""Patterns of modules' names mean what they mean to PEFT, and are matched in bounded time."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.adapters.module_patterns import ModulePatterns

ATOMS = st.sampled_from(["a", "b", r"\.", ".", "[ab]", "[^a]", r"\d", r"[^\d_]", r"\w", r"\s", "[a-c1]", "x1"])
REPEATS = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,3}", "{2,}", "*?", "+?", "{1,2}?"])


def grown(smaller: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("{}{}".format, smaller, smaller),
        st.builds("({}|{})".format, smaller, smaller),
        st.builds("(?:{}|)".format, smaller),
        st.builds("({}){}".format, smaller, REPEATS),
    )


@given(st.recursive(ATOMS, grown, max_leaves=8), st.text("ab.1x_", max_size=8))
def test_a_pattern_matches_what_pefts_expression_matches(pattern: str, name: str) -> None:
    expected = re.match(rf"(.*\.)?({pattern})$", name) is not None
    assert ModulePatterns({pattern: True}).value(name, default=False) is expected


@given(st.text("ab.-", min_size=1, max_size=6), st.text("ab.-", max_size=8))
def test_so_does_a_plain_name(pattern: str, name: str) -> None:
    expected = re.match(rf"(.*\.)?({pattern})$", name) is not None
    assert ModulePatterns({pattern: True}).value(name, default=False) is expected


def test_the_first_pattern_counts() -> None:
    assert ModulePatterns({r".*\.q_proj": 1, "q_proj": 2}).value("a.b.q_proj", 0) == 1
    assert ModulePatterns({"^b.q_proj": 1, "q_proj": 2}).value("a.b.q_proj", 0) == 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "pattern",
    [
        *(r"(\w|.|\.)+X", "((a*)*)*X", "(.*.*.*.*)*X", "(a|b|ab)*" * 20 + "X", "a{99999}"),
        *("(" * 60 + "a*" + ")*" * 60 + "X", "(.*a){20}.{20}X", ".*a.{15}X"),
    ],
)
def test_a_pattern_that_backtracks_is_matched(pattern: str) -> None:
    """Python's `re` would take longer than the deadline of the test for most of them."""
    patterns = ModulePatterns({pattern: 1})
    assert patterns.value("model.layers.0.self_attn.q_proj." + "a" * 200, 0) == 0


@pytest.mark.timeout(60)
def test_what_takes_too_many_steps_is_refused() -> None:
    patterns = ModulePatterns({"(a{0,1000}){0,1000}X": 1})
    with pytest.raises(ValueError, match="is not supported"):
        patterns.value("a" * 200, 0)


def test_all_patterns_of_a_field_are_bounded() -> None:
    with pytest.raises(ValueError, match="the patterns have 102,900 characters; at most 65,536 are supported"):
        ModulePatterns({f"({i:03d}" + "[abc]" * 50 + "x)": i for i in range(400)} | {"plain" * 100: 0})


@pytest.mark.parametrize("pattern", [r"(a)\1", "(?=a)b", "(?<!a)b", r"a\b", "(a", "a^b", "^a|b", "*"])
def test_what_needs_backtracking_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="is not supported"):
        ModulePatterns({pattern: 1})
