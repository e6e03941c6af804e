"""Interface of a tool-call format, and code shared by formats: functions, delimiters and grammar rules."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from router.text.answer_grammar import ANY_OBJECT, document_expression, is_special, json_expression, literal, rule
from router.text.calls.scanner import CallScanner, Layout, MarkedScanner
from router.text.schema import Document, Shapes, canonical, enforceable
from router.text.thought_marks import ThoughtMarks

PROBE_NAME, PROBE_ARGUMENT, PROBE_VALUE, PROBE_CALL_ID = "probe_function", "probe_argument", "probe value", "probe0001"
"""Parts of the probe call that a chat template renders to reveal its format."""
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
Message = Mapping[str, Any]
Spell = Callable[[str], str]
"""Writes a delimiter in a grammar: as a token if it is a special token of the vocabulary, otherwise as text."""
TEXT = r"/(.|\n)*/"
BREAK = f"{literal(chr(10))}?"
BLANK = f"{literal(' ')}?"
"""Optional white space between delimiters and JSON tokens, in which versions of a model differ."""
BLANKS = r"[ \t\r\n]{0,8}"
"""Optional white space within a lexeme. Limited so that it cannot fill an answer."""
GAP = r"/\n[ \t]{0,32}| /?"
"""Optional white space where a template may break the line and indent."""


@dataclass(frozen=True)
class Function:
    """A function that a model may call. `parameters` is the JSON schema of its arguments, or None without arguments."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None

    def as_tool(self) -> dict[str, Any]:
        """Return the function as an OpenAI tool, the form that chat templates also expect."""
        known = {"name": self.name, "description": self.description, "parameters": self.parameters or ANY_OBJECT}
        return {"type": "function", "function": {key: value for key, value in known.items() if value is not None}}

    @cached_property
    def arguments(self) -> Document:
        """Schema of the arguments, rewritten to keywords that grammars enforce.

        Arguments are always an object, whatever type the schema has. Keywords that cannot be enforced are ignored.
        Raises Unenforceable, a ValueError, for unresolved references and schemas over the limits.
        """
        document = canonical(NO_ARGUMENTS if self.parameters is None else self.parameters)
        return enforceable(replace(document, root={**document.root, **ANY_OBJECT}), lenient=True)

    @cached_property
    def shapes(self) -> Shapes:
        """Shapes of the arguments. Raises Unenforceable."""
        return Shapes(self.arguments)

    def read(self) -> None:
        """Compute and cache the shapes, and those of the arguments. Raises Unenforceable."""
        _ = self.shapes.root_objects


@dataclass(frozen=True, slots=True)
class Wanted:
    """Constraint on an answer: calls of `functions`, one or `several`.

    Unless a call is `required`, the model may write JSON of the schema `answer` instead. Without `answer` it may write
    any text, also before and after calls. Reasoning between marks is not part of the answer (`router.text.prelude`).
    """

    functions: Sequence[Function]
    required: bool = False
    several: bool = True
    answer: Mapping[str, Any] | None = None


class CallFormat(ABC):
    """Interface of a tool-call format: detection, scanner, grammar and rendering. Instances store only their variant.

    `rendered_call` and `rendered_argument` match what a chat template renders for a call of `PROBE_NAME` with
    `PROBE_VALUE` for `PROBE_ARGUMENT`.
    """

    name: ClassVar[str]
    """Value of `--tool-parser`."""
    marks: tuple[str, ...] = ()
    """Delimiters that may be special tokens. They are kept in the text of an answer for the scanner."""
    silent_marks: ClassVar[tuple[str, ...]] = ()
    """Special tokens that the model writes around texts. They are not part of an answer's text."""
    openings: tuple[str, ...]
    """Texts that begin a call."""
    layouts: Sequence[Layout]
    """Ways to write one or more consecutive calls, starting with one of the openings."""
    hints: tuple[str, ...] = ()
    """Texts of which a chat template has one if its model writes this format, though it does not render calls."""
    rendered_argument: str = rf'"{PROBE_ARGUMENT}":\s*"{PROBE_VALUE}"'
    """Regular expression of a rendered argument. The default matches JSON that is not nested in a string."""
    has_channels: ClassVar[bool] = False
    """Whether every answer is in this format, even without tools. The scanner then also separates reasoning."""
    thought_marks: ClassVar[ThoughtMarks | None] = None
    """With channels: the marks of a message with reasoning."""
    is_unmarked: ClassVar[bool] = False
    """Whether calls have no delimiter. A template's calls then are in this format only if they begin as texts do."""
    reads_schemas: ClassVar[bool] = False
    """Whether the scanner needs the functions' schemas to parse a call."""

    @property
    @abstractmethod
    def rendered_call(self) -> str:
        """Regular expression of a rendered call. The first matching format in the registry is selected."""

    def scanner(
        self, *, start: int, only_calls: bool, functions: Mapping[str, Function], thoughts: bool = True
    ) -> CallScanner:
        """Create a scanner for an answer that begins at position `start`.

        `only_calls`: the answer either begins with a call or has none. `functions` are indexed by name. `thoughts`: a
        format with channels separates reasoning from text. The default scanner expects JSON arguments in one of the
        `layouts`, and without delimiters, a call of one of the functions.
        """
        names = functions if self.is_unmarked else None
        return MarkedScanner(self.openings, self.layouts, start=start, only_calls=only_calls, names=names)

    @abstractmethod
    def grammar(self, wanted: Wanted, spell: Spell) -> str:
        """Write the grammar of the answers that `wanted` allows. Raises Unenforceable."""

    def prelude(self, spell: Spell) -> str:
        """Write the rule `prelude` of the text before content in a required form; "" for a format without channels."""
        return ""

    def silent(self, spell: Spell) -> list[str]:
        """Return those of `silent_marks` that are special tokens, as spelled in a grammar."""
        return list(filter(is_special, map(spell, self.silent_marks)))

    @abstractmethod
    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Render calls, given as (name, JSON arguments), in the model's syntax, for chat templates without tools."""

    def written_calls(self, message: Message) -> str:
        """Render the calls of a message."""
        functions = [call["function"] for call in message["tool_calls"]]
        return self.written([(function["name"], arguments_text(function)) for function in functions])

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Adapt messages with calls to the chat templates of this format's models."""
        return [dict(message) for message in messages]


class SectionFormat(CallFormat):
    """Base class of formats that write JSON calls in a section delimited by the first two `marks`."""

    between = ""
    """Right side of a rule for the text between two calls."""

    def grammar(self, wanted: Wanted, spell: Spell) -> str:
        opened, closed, *_ = map(spell, self.marks)
        before, rules = opening(opened)
        rules = rules if free(wanted) else ""
        rules += rule("listed", f"{row('body', self.between, several=wanted.several)} {closed}")
        rules += bodies(wanted.functions, lambda function, arguments: self.body(function, arguments, spell))
        return answer_rules(wanted, f"{opened} listed", f"{before} listed", self.silent(spell)) + rules

    @abstractmethod
    def body(self, function: Function, arguments: str, spell: Spell) -> str:
        """Return the right side of a rule for a call of `function`. `arguments` is the name of its arguments' rule."""


def arguments_text(function: Message) -> str:
    """Return the arguments of a message's call, which are an object or text, as JSON text."""
    arguments = function.get("arguments") or {}
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def answer_rules(wanted: Wanted, calls: str, begun: str, silent: Sequence[str] = ()) -> str:
    """Write the rules `start`, `answer`, `begun` and `TEXT`.

    `calls` and `begun` are right sides of rules: an answer that consists of calls, and text followed by calls. `silent`
    are special tokens that may be written after text.
    """
    if wanted.required:
        return rule("start", calls)
    if wanted.answer is not None:
        return rule("start", f"{calls} | answer") + rule("answer", json_expression(wanted.answer))
    start = "begun* TEXT" if wanted.several else "(begun | TEXT)"
    if silent:
        start = f"(TEXT ({' | '.join(silent)}))* {start}"
    return rule("start", start) + rule("begun", begun) + rule("TEXT", TEXT)


def free(wanted: Wanted) -> bool:
    """Whether the answer may contain any text."""
    return not wanted.required and wanted.answer is None


def opening(mark: str, name: str = "opening") -> tuple[str, str]:
    """Return the right side of a rule for text up to a delimiter, and the helper rule that it needs, if any."""
    if is_special(mark):
        return f"TEXT {mark}", ""
    return name, rule(f"{name}[lazy]", f"TEXT {mark}")


def unmarked(functions: Sequence[Function], head: Callable[[str], str], rest: str, *, gap: str = "") -> tuple[str, str]:
    """Return the right side of a rule for text up to and including a call without delimiter, and the rules it needs.

    `head` writes the lexeme up to a function's arguments from its name. `gap` precedes the arguments, `rest` follows.
    """
    begun = " | ".join([f"open_{i} {gap} arguments_{i} {rest}" for i in range(len(functions))])
    return begun, "".join([rule(f"open_{i}[lazy]", head(function.name)) for i, function in enumerate(functions)])


def text_up_to(*words: str) -> str:
    """Return the lexemes of text that ends with these words, with optional white space between them."""
    return f"TEXT /{BLANKS.join(map(re.escape, words))}/"


def row(calls: str, between: str, *, several: bool) -> str:
    """Return the right side of a rule for one call, or for `several` calls separated by `between`."""
    return f"{calls} ({between} {calls})*" if several else calls


def bodies(functions: Sequence[Function], body: Callable[[Function, str], str]) -> str:
    """Write the rule `body`, a call of any function. The callback `body` writes one from its arguments' rule name."""
    rules = rule("body", " | ".join(f"body_{i}" for i in range(len(functions))))
    for i, function in enumerate(functions):
        rules += rule(f"body_{i}", body(function, f"arguments_{i}"))
    return rules + arguments_rules(functions)


def read_object(arguments: str) -> dict[str, Any] | None:
    """Parse the JSON arguments of a client's earlier call. Returns None unless they are an object."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return given if isinstance(given, dict) else None


def json_call(
    name: str,
    keys: Sequence[str],
    arguments: str,
    more: str = "",
    *,
    name_key: str = "name",
    before: str = "",
    gap: str = BLANK,
) -> str:
    """Return the right side of a rule for a call as a JSON object with its name, a member of `keys`, then `more`.

    `before` are the members before the name, `gap` the white space between members. Each JSON token is a separate
    lexeme. A longer lexeme would take precedence over JSON of the answer's schema.
    """
    inner = "" if gap == BLANK else gap
    called, given = member(literal(json.dumps(name)), name_key), member(arguments, *keys)
    return f"{literal('{')} {inner} {before} {called} {literal(',')} {gap} {given} {more} {inner} {literal('}')}"


def member(value: str, *names: str) -> str:
    """Return the right side of a rule for a member of a JSON object with one of these names."""
    return f"({' | '.join([literal(json.dumps(name)) for name in names])}) {literal(':')} {BLANK} {value}"


def arguments_rules(functions: Sequence[Function]) -> str:
    """Write a rule for the JSON arguments of each function."""
    return "".join(
        rule(f"arguments_{i}", document_expression(function.arguments, lenient=True))
        for i, function in enumerate(functions)
    )
