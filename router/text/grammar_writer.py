"""The program that writes and compiles the grammars of a router's requests (`common/grammar/compiler.py`).

    router: demand ──text──> this program ──fork──> a child: writes the grammar of the demand, and compiles it
            verdict with the grammar <──────────────────────┘

A demand is a constraint on an answer: a schema, pattern, choice, set of rules or tool calls. It contains text of a
client, for which libraries may take unbounded time and memory. The router only encodes it, in linear time, in C.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self, TypeAlias

import msgspec

from common.grammar import main
from router.text.answer_grammar import bounded, choice_grammar, free_grammar, json_grammar, regex_grammar
from router.text.calls import FORMATS, CallFormat, Function, Spell, Wanted

PROGRAM = "router.text.grammar_writer"


class JsonDemand(msgspec.Struct, frozen=True, tag="json"):
    """JSON that matches a schema. `schema` is JSON text."""

    schema: str

    @classmethod
    def of(cls, schema: Mapping[str, Any] | bool) -> Self:
        """Encode a schema. Raises RecursionError if it is nested too deeply."""
        return cls(json.dumps(schema))

    def grammar(self) -> str:
        """Write the grammar; see `grammar_of`."""
        return json_grammar(json.loads(self.schema))


class RegexDemand(msgspec.Struct, frozen=True, tag="regex"):
    """Full matches of a regular expression."""

    pattern: str

    def grammar(self) -> str:
        return regex_grammar(self.pattern)


class ChoiceDemand(msgspec.Struct, frozen=True, tag="choice"):
    """One of some texts."""

    choices: tuple[str, ...]

    def grammar(self) -> str:
        return choice_grammar(self.choices)


class RulesDemand(msgspec.Struct, frozen=True, tag="rules"):
    """Texts of a client's grammar."""

    rules: str

    def grammar(self) -> str:
        return free_grammar(self.rules)


class CallsDemand(msgspec.Struct, frozen=True, tag="calls"):
    """Tool calls in a format, by its number in `FORMATS`, with the spelling of its marks.

    `functions` and `answer` are JSON text: a list of names and parameters, and a schema or null.
    """

    format: int
    marks: dict[str, str]
    functions: str
    required: bool
    several: bool
    answer: str
    thought: tuple[str, str] | None

    @classmethod
    def of(cls, call_format: CallFormat, spell: Spell, wanted: Wanted) -> Self:
        """Encode the functions. Raises RecursionError if a schema is nested too deeply."""
        functions = json.dumps([[function.name, function.parameters] for function in wanted.functions])
        marks = {mark: spell(mark) for mark in call_format.marks}
        answer = json.dumps(wanted.answer)
        return cls(_number_of(call_format), marks, functions, wanted.required, wanted.several, answer, wanted.thought)

    def grammar(self) -> str:
        functions = [Function(name, None, parameters) for name, parameters in json.loads(self.functions)]
        wanted = Wanted(functions, self.required, self.several, json.loads(self.answer), self.thought)
        return FORMATS[self.format].grammar(wanted, self.marks.__getitem__)


def _number_of(call_format: CallFormat) -> int:
    kind, variant = type(call_format), vars(call_format)
    return next(i for i, each in enumerate(FORMATS) if type(each) is kind and vars(each) == variant)


Demand: TypeAlias = JsonDemand | RegexDemand | ChoiceDemand | RulesDemand | CallsDemand
"""A constraint on the form of an answer."""


def text_of(demand: Demand) -> str:
    """Encode a demand for `GrammarChecks`. Raises ValueError for text that is not Unicode."""
    return msgspec.json.encode(demand).decode()


def grammar_of(text: str) -> str:
    """Write the grammar of an encoded demand.

    Raises ValueError for a demand that has no grammar, and RecursionError for one that is nested too deeply.
    """
    demand: Demand = msgspec.json.decode(text, type=Demand)
    grammar = bounded(demand.grammar())
    grammar.encode()  # raises if the text is not Unicode
    return grammar


if __name__ == "__main__":
    main(grammar_of)
