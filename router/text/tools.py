"""Functions that a model may call: how it is told of them, what a call looks like, and which calls a text has.

A call is written as models of the Hermes and Qwen families were taught it:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Other models are told to do so. Either way a grammar holds them to it: what begins as a call becomes one of a function
that there is, with arguments that match its schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from router.text.answer_part import CallPart, Part, TextPart, joined
from router.text.grammar import ANY_OBJECT, json_expression, literal, rule

OPEN, CLOSE = "<tool_call>", "</tool_call>"
NAME, ARGUMENTS = '\n{"name": "', '", "arguments": '
END = "}\n" + CLOSE
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

Message = Mapping[str, Any]


class Function(NamedTuple):
    """What may be called. `parameters` is the JSON schema of its arguments; None: it has none."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None

    def as_tool(self) -> dict[str, Any]:
        """As OpenAI and chat templates write it."""
        known = {"name": self.name, "description": self.description, "parameters": self.parameters or ANY_OBJECT}
        return {"type": "function", "function": {key: value for key, value in known.items() if value is not None}}


def call_grammar(
    functions: Sequence[Function], *, required: bool, several: bool, answer: Mapping[str, Any] | None = None
) -> str:
    """Rules of an answer that calls functions: `several` or one, always or where the model wants to.

    Where it need not, it may write any text instead, and before a call; or JSON of the schema `answer`, if given.
    """
    calls = f"call ({literal(chr(10))}? call)*" if several else "call"
    if required:
        rules = rule("start", calls)
    elif answer is not None:
        rules = rule("start", f"{calls} | answer") + rule("answer", json_expression(answer))
    else:
        rules = rule("start", "(begun)* TEXT" if several else "begun | TEXT")
        rules += rule("begun", "opening body") + rule("opening[lazy]", f"TEXT {literal(OPEN)}")
        rules += rule("TEXT", r"/(.|\n)*/")
    rules += rule("call", f"{literal(OPEN)} body") if required or answer is not None else ""
    rules += rule("body", " | ".join(f"body_{i}" for i in range(len(functions))))
    for i, function in enumerate(functions):
        schema = NO_ARGUMENTS if function.parameters is None else {**function.parameters, **ANY_OBJECT}
        rules += rule(f"body_{i}", f"{literal(NAME + function.name + ARGUMENTS)} arguments_{i} {literal(END)}")
        rules += rule(f"arguments_{i}", json_expression(schema, lenient=True))
    return rules


# ---------------------------------------------------------------- for templates that know nothing of tools

INSTRUCTIONS = """\
You can call these functions, each described by a line of JSON:
<tools>
{tools}
</tools>
To call a function, write its name and arguments as JSON between tool_call tags, a pair of tags for each call:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>"""


def knows_tools(template: str | None) -> bool:
    """Whether a chat template tells its model of tools, and of calls, in the form above."""
    return template is not None and OPEN in template and "tools" in template


def speaks_of_tools(message: Message) -> bool:
    """Whether a message is a tool's, or calls one."""
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def told(messages: Sequence[Message], functions: Sequence[Function]) -> list[dict[str, Any]]:
    """The conversation with tools, calls and their results written as text of system, assistant and user.

    Contents must be texts. Results that follow each other, or come before what the user says, are one message: some
    templates want user and assistant to take turns.
    """
    plain: list[dict[str, Any]] = []
    before = ""
    for message in messages:
        spoken = _spoken(message)
        if "tool" in (message["role"], before) and plain and spoken["role"] == plain[-1]["role"]:
            plain[-1] = {**plain[-1], "content": f"{plain[-1]['content']}\n{spoken['content']}"}
        else:
            plain.append(spoken)
        before = message["role"]
    if not functions:
        return plain
    tools = "\n".join(json.dumps(function.as_tool(), ensure_ascii=False) for function in functions)
    text = INSTRUCTIONS.format(tools=tools)
    if plain and plain[0]["role"] in ("system", "developer"):
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _spoken(message: Message) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls") or ()
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    texts = [message["content"]] if message["content"] else []
    return rest | {"content": "\n".join((*texts, *(_call_text(call["function"]) for call in calls)))}


def _call_text(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments") or {}
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{OPEN}{NAME}{function['name']}{ARGUMENTS}{written}{END}"


# ---------------------------------------------------------------- of a text


class _Place(Enum):
    """Where in an answer the scanner is."""

    BEGIN = "begin"  # of an answer that has calls from its first character on, or none
    PLAIN = "plain"  # an answer that has none
    TEXT = "text"
    GAP = "gap"  # behind a call, where blanks are no text
    NAME = "name"
    ARGUMENTS = "arguments"
    END = "end"  # of a call


class CallScanner:
    """Takes a text that keeps to `call_grammar` apart, as it arrives. Text may be cut off anywhere.

    `start` is the text's place in the answer. With `only_calls`, a text that does not begin with a call has none: it
    is JSON, which may show a call's mark in its strings.
    """

    def __init__(self, *, start: int = 0, only_calls: bool = False) -> None:
        self.num_calls = 0
        self._place = _Place.BEGIN if only_calls else _Place.TEXT
        self._held, self._end = "", start
        self._extent = _Extent()

    @property
    def calls_are_whole(self) -> bool:
        """Whether each call whose name is known has all of its arguments."""
        return self._place is not _Place.ARGUMENTS

    def push(self, text: str) -> list[Part]:
        """What this adds, in the order of the text: what is said between calls, and parts of calls."""
        self._held += text
        self._end += len(text)
        parts: list[Part] = []
        while self._advance(parts):
            continue
        return joined(parts)

    def flush(self, *, cut: bool) -> list[Part]:
        """At the end: text that may begin a call. Where the text was `cut` off it is left out, as a call's name is."""
        parts: list[Part] = []
        if self._place in (_Place.BEGIN, _Place.TEXT) and not cut:
            self._say(self._held, parts)
        self._held = ""
        return parts

    def _advance(self, parts: list[Part]) -> bool:
        """One part of what is held; whether there may be another."""
        match self._place:
            case _Place.BEGIN:
                return self._look_for_begin()
            case _Place.PLAIN:
                return self._say(self._held, parts)
            case _Place.TEXT:
                return self._take_text(parts)
            case _Place.GAP:
                self._held = self._held.lstrip()
                return bool(self._held) and self._go_on(_Place.TEXT, self._held)
            case _Place.NAME:
                return self._take_name(parts)
            case _Place.ARGUMENTS:
                return self._take_arguments(parts)
            case _Place.END:
                _, found, after = self._held.partition(END)
                return bool(found) and self._go_on(_Place.GAP, after)

    def _look_for_begin(self) -> bool:
        if len(self._held) < len(OPEN) and OPEN.startswith(self._held):
            return False
        return self._go_on(_Place.TEXT if self._held.startswith(OPEN) else _Place.PLAIN, self._held)

    def _take_text(self, parts: list[Part]) -> bool:
        said, found, after = self._held.partition(OPEN)
        if not found:
            said = said[: len(said) - overlap(said, OPEN)]
        self._say(said, parts)
        return bool(found) and self._go_on(_Place.NAME, after)

    def _take_name(self, parts: list[Part]) -> bool:
        head, found, after = self._held.partition(ARGUMENTS)
        if not found:
            return False
        parts.append(CallPart(self.num_calls, name=head.removeprefix(NAME)))
        self.num_calls += 1
        self._extent = _Extent()
        return self._go_on(_Place.ARGUMENTS, after)

    def _take_arguments(self, parts: list[Part]) -> bool:
        length = self._extent.measure(self._held)
        if length:
            parts.append(CallPart(self.num_calls - 1, arguments=self._held[:length]))
        self._held = self._held[length:]
        return self._extent.complete and self._go_on(_Place.END, self._held)

    def _say(self, text: str, parts: list[Part]) -> bool:
        """Give out the beginning of what is held, after which there is nothing more to find in it for now."""
        if text:
            parts.append(TextPart(text, self._end - len(self._held)))
            self._held = self._held[len(text) :]
        return False

    def _go_on(self, place: _Place, held: str) -> bool:
        self._place, self._held = place, held
        return True


class _Extent:
    """Where a JSON object ends, as its text arrives."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.complete = False

    def measure(self, text: str) -> int:
        """How many of these characters belong to the object."""
        for i, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.complete = True
                    return i + 1
        return len(text)


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may begin `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
