"""Interface of a tool-call format, and what formats have in common: functions, delimiters and grammar rules."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from router.text.answer_grammar import ANY_OBJECT, document_expression, json_expression, literal, rule
from router.text.calls.scanner import CallScanner, Layout, MarkedScanner
from router.text.schema import Document, Shapes, canonical, enforceable

PROBE_NAME, PROBE_ARGUMENT, PROBE_VALUE, PROBE_CALL_ID = "probe_function", "probe_argument", "probe value", "probe0001"
"""The call that a chat template renders to show its model's format."""
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
Message = Mapping[str, Any]
Spell = Callable[[str], str]
"""Spells a mark in a grammar: as a token if the vocabulary has it as a special token, else as text."""
TEXT = r"/(.|\n)*/"
BREAK = f"{literal(chr(10))}?"
BLANK = f"{literal(' ')}?"
"""Optional white space between marks and between JSON tokens, in which the versions of a model differ."""


@dataclass(frozen=True)
class Function:
    """A function that a model may call. `parameters` is the JSON schema of its arguments; None: it takes none."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None

    def as_tool(self) -> dict[str, Any]:
        """Return the function as a tool of OpenAI's API, which chat templates take too."""
        known = {"name": self.name, "description": self.description, "parameters": self.parameters or ANY_OBJECT}
        return {"type": "function", "function": {key: value for key, value in known.items() if value is not None}}

    @cached_property
    def arguments(self) -> Document:
        """The schema of the arguments, in keywords that grammars enforce. References refer to the function's document.

        Arguments are always an object, whatever type the schema has. Keywords that cannot be enforced are ignored.
        Raises Unenforceable, a ValueError, for an undefined reference and for schemas beyond the bounds.
        """
        document = canonical(NO_ARGUMENTS if self.parameters is None else self.parameters)
        return enforceable(replace(document, root={**document.root, **ANY_OBJECT}), lenient=True)

    @cached_property
    def shapes(self) -> Shapes:
        """The shapes of the arguments. Raises as `arguments` does."""
        return Shapes(self.arguments)

    def read(self) -> None:
        """Compute and cache the shapes. Raises as `arguments` does."""
        _ = self.shapes


@dataclass(frozen=True, slots=True)
class Wanted:
    """Constraint on an answer: calls of `functions`, one or `several`.

    Unless a call is `required`, the model may write JSON of the schema `answer` instead. Without such a schema it may
    write any text, also before and after calls. `thought` are the marks of a thought that may precede the answer.
    """

    functions: Sequence[Function]
    required: bool = False
    several: bool = True
    answer: Mapping[str, Any] | None = None
    thought: tuple[str, str] | None = None


class CallFormat(ABC):
    """A tool-call format: how it is recognised, scanned, enforced and rendered. Instances store only their variant.

    `rendered_call` and `rendered_argument` recognise the format in what a chat template renders for a call of
    `PROBE_NAME` with `PROBE_VALUE` for `PROBE_ARGUMENT`.
    """

    name: ClassVar[str]
    """The name for `--tool-parser`."""
    marks: ClassVar[tuple[str, ...]] = ()
    """Delimiters that may be special tokens. The scanner sees them in the text of an answer."""
    openings: ClassVar[tuple[str, ...]]
    """Texts with which calls begin."""
    layouts: ClassVar[Sequence[Layout]]
    """The spellings of a call, or of consecutive calls, from one of the openings on."""
    rendered_argument: str = rf'"{PROBE_ARGUMENT}":\s*"{PROBE_VALUE}"'
    """A regular expression of a rendered argument. By default arguments are JSON, and not a text inside JSON."""
    has_channels: ClassVar[bool] = False
    """Whether every answer is in this format, with or without tools. The scanner then separates thoughts too."""
    reads_schemas: ClassVar[bool] = False
    """Whether the scanner needs the schemas of the functions to read a call."""

    @property
    @abstractmethod
    def rendered_call(self) -> str:
        """A regular expression of a rendered call. The first format in the registry that matches is taken."""

    def scanner(
        self, *, start: int, only_calls: bool, functions: Mapping[str, Function], thoughts: bool = True
    ) -> CallScanner:
        """Create the scanner of an answer that begins at position `start`.

        `only_calls`: the answer either begins with a call or has none; `functions` by their names. Without `thoughts` a
        format with channels returns thoughts as text. By default, calls with JSON arguments in one of the `layouts`.
        """
        return MarkedScanner(self.openings, self.layouts, start=start, only_calls=only_calls)

    @abstractmethod
    def grammar(self, wanted: Wanted, spell: Spell) -> str:
        """Write the grammar of the answers that `wanted` allows. Raises Unenforceable."""

    @abstractmethod
    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Render calls, each a name and JSON arguments, as the model writes them. For chat templates without tools."""

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Adapt messages with calls to the chat templates of this format's models."""
        return [dict(message) for message in messages]


class SectionFormat(CallFormat):
    """Calls with arguments in JSON, in a section whose delimiters are the first two `marks`."""

    between = ""
    """Right side of a rule for the text between two calls."""

    def grammar(self, wanted: Wanted, spell: Spell) -> str:
        opened, closed, *_ = map(spell, self.marks)
        before, rules = opening(opened)
        rules = rules if free(wanted) else ""
        rules += rule("listed", f"{row('body', self.between, several=wanted.several)} {closed}")
        rules += bodies(wanted.functions, lambda function, arguments: self.body(function, arguments, spell))
        return answer_rules(wanted, f"{opened} listed", f"{before} listed") + rules

    @abstractmethod
    def body(self, function: Function, arguments: str, spell: Spell) -> str:
        """Return the right side of a rule for a call of `function`. `arguments` is the name of the arguments' rule."""


def answer_rules(wanted: Wanted, calls: str, begun: str) -> str:
    """Write the rules `start`, `answer`, `begun` and `TEXT`.

    `calls` and `begun` are right sides of rules: of an answer that consists of calls, and of text followed by calls.
    """
    if wanted.required:
        return rule("start", calls)
    if wanted.answer is not None:
        return rule("start", f"{calls} | answer") + rule("answer", json_expression(wanted.answer))
    start = "begun* TEXT" if wanted.several else "(begun | TEXT)"
    if wanted.thought is not None:
        opened, closed = wanted.thought  # a prompt may have opened the thought
        start = f"({opened}? TEXT {closed})? {start}"
    return rule("start", start) + rule("begun", begun) + rule("TEXT", TEXT)


def free(wanted: Wanted) -> bool:
    """Whether the answer may have any text."""
    return not wanted.required and wanted.answer is None


def opening(mark: str, name: str = "opening") -> tuple[str, str]:
    """Return the right side of a rule for text up to a mark, and the rule that it refers to. `mark` is spelled."""
    if mark.startswith("<["):  # a special token is never part of text
        return f"TEXT {mark}", ""
    return name, rule(f"{name}[lazy]", f"TEXT {mark}")


def row(calls: str, between: str, *, several: bool) -> str:
    """Return the right side of a rule for one call, or for `several` with `between` in between."""
    return f"{calls} ({between} {calls})*" if several else calls


def bodies(functions: Sequence[Function], body: Callable[[Function, str], str]) -> str:
    """Write the rule `body`, a call of any function. The argument `body` writes one, given the arguments' rule."""
    rules = rule("body", " | ".join(f"body_{i}" for i in range(len(functions))))
    for i, function in enumerate(functions):
        rules += rule(f"body_{i}", body(function, f"arguments_{i}"))
    return rules + arguments_rules(functions)


def json_call(name: str, key: str, arguments: str, more: str = "") -> str:
    """Return the right side of a rule for a call as a JSON object with the members `name` and `key`, then `more`.

    Each JSON token is a lexeme, because a longer lexeme would take precedence over JSON of the answer's schema.
    """
    called = f"{literal(json.dumps('name'))} {literal(':')} {BLANK} {literal(json.dumps(name))}"
    given = f"{literal(json.dumps(key))} {literal(':')} {BLANK} {arguments}"
    return f"{literal('{')} {called} {literal(',')} {BLANK} {given} {more} {literal('}')}"


def arguments_rules(functions: Sequence[Function]) -> str:
    """Write a rule for the JSON arguments of each function."""
    return "".join(
        rule(f"arguments_{i}", document_expression(function.arguments, lenient=True))
        for i, function in enumerate(functions)
    )
