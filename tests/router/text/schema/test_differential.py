"""Schemas made at random: every answer of their grammars matches them, and what matches them can be an answer."""

from __future__ import annotations

import functools
import json
import random
import re
from typing import Any

import llguidance
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from common.grammar.vocabulary import compile_grammar
from common.model_files.resolve import resolve_model
from router.text.answer_grammar import json_grammar
from router.text.schema.keywords import Unenforceable

from ....examples import examples
from ....random_documents import Documents
from .validity import Validity

NAMES = ("a", "b", "c")
ALL = dict.fromkeys(NAMES, True)
OF_NAMES = ({"pattern": "^[ab]"}, {"enum": ["a", "c"]}, {"maxLength": 1}, {"not": {"const": "b"}})
NUM_ANSWERS = 3
TEXTS = ("", "a", "ab", "b", "xyz")
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-2, 4), st.sampled_from(TEXTS))
BOUND = st.integers(0, 3)


def members(child: SearchStrategy[Any]) -> SearchStrategy[dict[str, Any]]:
    """Some of the names, in order: answers have members in the schema's order."""
    return st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, child)).map(
        lambda d: {n: d[n] for n in NAMES if n in d}
    )


def some_names() -> SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(NAMES), max_size=2, unique=True)


def extended(child: SearchStrategy[Any]) -> SearchStrategy[dict[str, Any]]:
    """A schema of any keywords. Objects name all members in order and say whether they have others: none is closed."""
    several = st.lists(child, min_size=1, max_size=3)
    of_objects = {
        "properties": members(child).map(lambda some: {**ALL, **some}), "required": some_names(),
        "minProperties": BOUND, "maxProperties": BOUND, "propertyNames": st.sampled_from(OF_NAMES),
        "dependentRequired": members(some_names()), "dependentSchemas": members(child),
    }  # fmt: skip
    of_arrays = {
        "items": child, "prefixItems": several, "minItems": BOUND, "maxItems": BOUND, "contains": child,
        "uniqueItems": st.booleans(),
    }  # fmt: skip
    of_others = {
        "minimum": BOUND, "exclusiveMaximum": BOUND, "multipleOf": st.just(2), "minLength": BOUND, "maxLength": BOUND,
        "pattern": st.sampled_from(["^(a|b)$", "^a", "b"]), "format": st.just("anything"),
        "enum": st.lists(SCALARS, min_size=1, max_size=3), "const": SCALARS,
    }  # fmt: skip
    of_all = {
        "not": child, "oneOf": several, "anyOf": several, "allOf": several, "if": child, "then": child, "else": child,
    }  # fmt: skip
    kinds = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object", ["string", "object"]])
    typed = st.fixed_dictionaries({"type": kinds})
    choice = st.sampled_from(sorted({**of_objects, **of_arrays, **of_others, **of_all}))
    every = {**of_objects, **of_arrays, **of_others, **of_all}
    keywords = st.lists(choice, min_size=1, max_size=3, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries({key: every[key] for key in chosen})
    )
    first = st.sampled_from([{"properties": ALL, "additionalProperties": is_open} for is_open in (True, False)])
    parts = st.tuples(first, st.one_of(typed, st.just({})), keywords)
    return parts.map(lambda found: {**found[0], **found[1], **found[2]})


LEAVES = st.one_of(st.booleans(), SCALARS.map(lambda value: {"const": value}))
SCHEMAS = st.recursive(LEAVES, extended, max_leaves=6).filter(lambda schema: isinstance(schema, dict))
VALUES = st.recursive(SCALARS, lambda child: st.one_of(st.lists(child, max_size=3), members(child)), max_leaves=4)


@functools.cache
def documents() -> Documents:
    return Documents(resolve_model("tiny-random"))


def compiled(schema: Any) -> llguidance.LLMatcher:
    """The matcher of a schema that is served."""
    try:
        grammar = json_grammar(schema)
    except Unenforceable:
        assume(False)
    matcher, problem = compile_grammar(documents().vocabulary, grammar)
    assume(not problem)
    return matcher


def is_huge(text: bytes) -> bool:
    """Whether a number has an exponent beyond what can be judged."""
    return re.search(rb"[eE][+-]?\d{3}", text) is not None


LIMITS = settings(deadline=None, max_examples=examples(150), suppress_health_check=list(HealthCheck))


@LIMITS
@given(schema=SCHEMAS, seed=st.integers(0, 99))
def test_every_answer_matches_its_schema(schema: dict[str, Any], seed: int) -> None:
    matcher, validity, rng = compiled(schema), Validity(schema), random.Random(seed)
    for _ in range(NUM_ANSWERS):
        text = documents().draw(matcher, rng)
        if text is not None and not is_huge(text):
            assert not validity.problem(text), json.dumps(schema)


@pytest.mark.slow
@LIMITS
@given(schema=SCHEMAS, value=VALUES)
def test_whatever_matches_a_schema_can_be_an_answer(schema: dict[str, Any], value: Any) -> None:
    from jsonschema import Draft202012Validator  # seconds to import

    assume(Draft202012Validator(schema).is_valid(value))
    matcher = compiled(schema)
    assert documents().accepts(matcher, json.dumps(value).encode()), json.dumps(schema)
