"""Subprocess that writes and compiles the grammars of a router's requests (`common/grammar/compiler.py`).

    router: demand ──text──> this program ──fork──> a child: writes the grammar of the demand, and compiles it
            verdict with the grammar <──────────────────────┘

A demand is a constraint on an answer: a schema, pattern, choice, grammar or tool calls. It contains client input for
which libraries may need unbounded time and memory. The router itself only encodes it, in linear time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self, TypeAlias

import msgspec

from common.grammar import main
from router.text.answer_grammar import bounded, choice_grammar, free_grammar, json_grammar, regex_grammar
from router.text.calls import FORMATS, CallFormat, Function, Spell, Wanted
from router.text.prelude import Prelude

PROGRAM = "router.text.grammar_writer"


class JsonDemand(msgspec.Struct, frozen=True, tag="json"):
    """Constraint: JSON that matches a schema. `schema` is JSON text."""

    schema: str

    @classmethod
    def of(cls, schema: Mapping[str, Any] | bool) -> Self:
        """Encode a schema. Raises RecursionError if it is nested too deeply."""
        return cls(json.dumps(schema))

    def grammar(self) -> str:
        """Write the grammar; see `grammar_of`."""
        return json_grammar(json.loads(self.schema))


class RegexDemand(msgspec.Struct, frozen=True, tag="regex"):
    """Constraint: the full match of a regular expression."""

    pattern: str

    def grammar(self) -> str:
        return regex_grammar(self.pattern)


class ChoiceDemand(msgspec.Struct, frozen=True, tag="choice"):
    """Constraint: one of several texts."""

    choices: tuple[str, ...]

    def grammar(self) -> str:
        return choice_grammar(self.choices)

    def without(self, barred: str) -> ChoiceDemand:
        """Remove choices that begin with white space and the text `barred`. Raises ValueError if none are left."""
        left = tuple([choice for choice in self.choices if not choice.lstrip().startswith(barred)])
        if not left:
            raise ValueError(f"every choice begins with {barred!r}, with which this model begins its reasoning")
        return ChoiceDemand(left)


class RulesDemand(msgspec.Struct, frozen=True, tag="rules"):
    """Constraint: a grammar written by the client."""

    rules: str

    def grammar(self) -> str:
        return free_grammar(self.rules)


class CallsDemand(msgspec.Struct, frozen=True, tag="calls"):
    """Constraint: tool calls in a format, given by its index in `FORMATS`, with the spelling of its delimiters.

    `functions` and `answer` are JSON text: a list of names and parameters, and a schema or null.
    """

    format: int
    marks: dict[str, str]
    functions: str
    required: bool
    several: bool
    answer: str

    @classmethod
    def of(cls, call_format: CallFormat, spell: Spell, wanted: Wanted) -> Self:
        """Encode the functions. Raises RecursionError if a schema is nested too deeply."""
        functions = json.dumps([[function.name, function.parameters] for function in wanted.functions])
        marks = {mark: spell(mark) for mark in (*call_format.marks, *call_format.silent_marks)}
        answer = json.dumps(wanted.answer)
        return cls(FORMATS.index(call_format), marks, functions, wanted.required, wanted.several, answer)

    def grammar(self) -> str:
        functions = [Function(name, None, parameters) for name, parameters in json.loads(self.functions)]
        wanted = Wanted(functions, self.required, self.several, json.loads(self.answer))
        return FORMATS[self.format].grammar(wanted, self.marks.__getitem__)


Demand: TypeAlias = JsonDemand | RegexDemand | ChoiceDemand | RulesDemand | CallsDemand
"""A constraint on the form of an answer."""


class _Order(msgspec.Struct, frozen=True):
    """A demand, and the text that may precede the form."""

    demand: Demand
    prelude: Prelude | None = None


def text_of(demand: Demand, prelude: Prelude | None = None) -> str:
    """Encode a demand for `GrammarChecks`, with the text that may precede it. Raises ValueError for invalid Unicode."""
    return msgspec.json.encode(_Order(demand, prelude)).decode()


def grammar_of(text: str) -> str:
    """Write the grammar of an encoded demand.

    Raises ValueError if the demand has no grammar, and RecursionError if it is nested too deeply.
    """
    order = msgspec.json.decode(text, type=_Order)
    demand, prelude = order.demand, order.prelude
    if prelude is not None and prelude.barred and isinstance(demand, ChoiceDemand):
        demand = demand.without(prelude.barred)
    grammar = bounded(demand.grammar())
    if prelude is not None:
        grammar = prelude.before(grammar, is_regex=isinstance(demand, RegexDemand))
    grammar.encode()  # raises for invalid Unicode
    return grammar


if __name__ == "__main__":
    main(grammar_of)
