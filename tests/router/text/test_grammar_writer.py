"""Clients' grammars, patterns and schemas are read only in a subprocess, which can be killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress

import pytest

from common.errors import Unavailable
from common.grammar.checks import GrammarChecks, Verdict
from common.grammar.compiler import READ_BYTES
from common.model_files.resolve import resolve_model
from common.model_files.tiny import VOCAB_SIZE
from common.wire.sampling_params import MAX_GRAMMAR_CHARS
from router.text.calls.format import Function, Wanted
from router.text.calls.registry import FORMATS
from router.text.grammar_writer import (
    PROGRAM,
    CallsDemand,
    ChoiceDemand,
    Demand,
    JsonDemand,
    RegexDemand,
    RulesDemand,
    grammar_of,
    text_of,
)

TRIES, WAIT_S = 3, 60.0
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["é", "\n"]}}, "required": ["a"]}
FUNCTIONS = [Function("f", "words", SCHEMA), Function("g.h-i", None, None)]


def chain(num_rules: int) -> str:
    """GBNF rules that refer to the next one each, from the first: resolving them is quadratic."""
    rules = [f'r{i}::=""""r{i + 1}' for i in range(num_rules)]
    return "\n".join(["root::=r0", *rules, f'r{num_rules}::=""'])


HOSTILE: dict[str, Demand] = {
    "line breaks": RulesDemand("\n" * MAX_GRAMMAR_CHARS),
    "a chain of rules": RulesDemand(chain(6000)[:MAX_GRAMMAR_CHARS]),
    "classes that do not end": JsonDemand.of({"pattern": r"\p{" * (MAX_GRAMMAR_CHARS // 3)}),
    "brackets that do not end": RegexDemand("[" * MAX_GRAMMAR_CHARS),
    "a pattern of groups": RegexDemand("(" * (MAX_GRAMMAR_CHARS // 2) + ")" * (MAX_GRAMMAR_CHARS // 2)),
    "a pattern of repetitions": RegexDemand("(((a{999}){999}){999}){999}"),
    "a deep schema": JsonDemand(f"{'[' * 100_000}{']' * 100_000}"),
    "a reference to many that refer to many": JsonDemand.of(
        {
            "$ref": "#/$defs/0",
            "$defs": {
                **{str(i): {"oneOf": [{"not": {"$ref": f"#/$defs/{i + 1}"}}] * 5} for i in range(30)},
                "30": {"type": "string"},
            },
        }
    ),
}


@pytest.fixture(scope="module")
def checks() -> Iterator[GrammarChecks]:
    made = GrammarChecks(resolve_model("tiny-random"), VOCAB_SIZE, program=PROGRAM)
    yield made
    made.close()


def verdict(checks: GrammarChecks, demand: Demand) -> Verdict:
    """Return the verdict. Retries as a client does, because a busy machine may give the compiler too little time."""
    for _ in range(TRIES - 1):
        with suppress(Unavailable):
            return checks.submit(text_of(demand)).result(WAIT_S)
    return checks.submit(text_of(demand)).result(WAIT_S)


def spell(mark: str) -> str:
    return f"<[{len(mark)}]>" if mark.startswith("<") else json.dumps(mark)


@pytest.mark.parametrize("number", range(len(FORMATS)))
def test_a_demand_for_calls_means_the_same_in_the_other_process(number: int) -> None:
    form = FORMATS[number]
    for answer in (None, SCHEMA):
        for required in (True, False):
            wanted = Wanted(FUNCTIONS, required, not required, answer)
            assert grammar_of(text_of(CallsDemand.of(form, spell, wanted))) == form.grammar(wanted, spell)


def test_the_process_returns_the_grammar_that_it_wrote(checks: GrammarChecks) -> None:
    long = ChoiceDemand(tuple(f"choice number {i}, é" for i in range(4000)))
    for demand in (JsonDemand.of(SCHEMA), RegexDemand("a+"), RulesDemand('root ::= "x"'), long):
        found = verdict(checks, demand)
        assert (found.problem, found.grammar) == ("", grammar_of(text_of(demand)))
    assert len(found.grammar) > READ_BYTES, "no single read returns it"


def test_a_grammar_that_cannot_be_written_is_the_problem(checks: GrammarChecks) -> None:
    assert verdict(checks, RulesDemand("x ::= y")).problem
    found = verdict(checks, ChoiceDemand(("é" * MAX_GRAMMAR_CHARS,)))
    assert f"the maximum is {MAX_GRAMMAR_CHARS:,}" in found.problem and not found.grammar


@pytest.mark.slow_except("line breaks", "a pattern of repetitions", "a deep schema")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_end_in_a_verdict(checks: GrammarChecks, name: str) -> None:
    verdict(checks, RegexDemand("a"))
    assert checks._compiler is not None
    before = checks._compiler
    assert verdict(checks, HOSTILE[name]).problem
    assert verdict(checks, RegexDemand("b")).problem == "" and checks._compiler is before
