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
from dataclasses import dataclass
from typing import Any, NamedTuple

from diptych.router.text.grammar import ANY_OBJECT, json_expression, literal, rule

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
        schema = NO_ARGUMENTS if function.parameters is None else {**ANY_OBJECT, **function.parameters}
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


@dataclass(frozen=True, slots=True)
class CallPart:
    """More of call `index` of an answer: `name` comes with its first part, `arguments` are JSON in pieces."""

    index: int
    name: str = ""
    arguments: str = ""


class CallScanner:
    """Takes a text that keeps to `call_grammar` apart, as it arrives. Text may be cut off anywhere."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._held = ""
        self._in_call = False
        self._arguments: _Extent | None = None

    def push(self, text: str) -> tuple[str, list[CallPart]]:
        """What this adds: text that is no call, and parts of calls."""
        self._held += text
        said: list[str] = []
        parts: list[CallPart] = []
        while self._advance(said, parts):
            continue
        return "".join(said), parts

    def flush(self) -> str:
        """At the end: text that only looked like a call's beginning. What a call lacks then, it lacks."""
        held, self._held = self._held, ""
        return "" if self._in_call else held

    def _advance(self, said: list[str], parts: list[CallPart]) -> bool:
        """One part of what is held; whether there may be another."""
        if self._arguments is not None:
            return self._take_arguments(self._arguments, parts)
        if self._in_call:
            return self._take_name(parts)
        if self.num_calls:  # between and behind calls there are line breaks
            self._held = self._held.lstrip()
        before, found, after = self._held.partition(OPEN)
        if found:
            said.append(before)
            self._held, self._in_call = after, True
            return True
        kept = overlap(self._held, OPEN)
        said.append(self._held[: len(self._held) - kept])
        self._held = self._held[len(self._held) - kept :]
        return False

    def _take_name(self, parts: list[CallPart]) -> bool:
        head, found, after = self._held.partition(ARGUMENTS)
        if not found:
            return False
        parts.append(CallPart(self.num_calls, name=head.removeprefix(NAME)))
        self.num_calls += 1
        self._held, self._arguments = after, _Extent()
        return True

    def _take_arguments(self, extent: _Extent, parts: list[CallPart]) -> bool:
        if not extent.complete:
            length = extent.measure(self._held)
            if length:
                parts.append(CallPart(self.num_calls - 1, arguments=self._held[:length]))
                self._held = self._held[length:]
        if not extent.complete or END not in self._held:
            return False
        self._held = self._held.partition(END)[2]
        self._in_call, self._arguments = False, None
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
