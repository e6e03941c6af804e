"""Functions that a model may call: how a prompt describes them, and the grammar of answers that call them.

A model whose chat template describes tools in our form of calls gets them from its template, any other by INSTRUCTIONS.
Either way the grammar makes each call one of a function that exists, with arguments that match its schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from router.text.answer_grammar import ANY_OBJECT, json_expression, literal, rule
from router.text.call_form import ARGUMENTS, END, NAME, OPEN

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

Message = Mapping[str, Any]


class Function(NamedTuple):
    """A function that a model may call. `parameters` is the JSON schema of its arguments; None: it takes none."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None

    def as_tool(self) -> dict[str, Any]:
        """The form of OpenAI's API and of chat templates."""
        known = {"name": self.name, "description": self.description, "parameters": self.parameters or ANY_OBJECT}
        return {"type": "function", "function": {key: value for key, value in known.items() if value is not None}}


def call_grammar(
    functions: Sequence[Function], *, required: bool, several: bool, answer: Mapping[str, Any] | None = None
) -> str:
    """The grammar of an answer that calls functions: one call or, with `several`, a row of them.

    Unless a call is `required`, the model may instead write JSON of the schema `answer`; without such a schema it may
    write any text, before a call too.
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


# ---------------------------------------------------------------- for templates without tools

INSTRUCTIONS = """\
You can call these functions, each described by a line of JSON:
<tools>
{tools}
</tools>
To call a function, write its name and arguments as JSON between tool_call tags, a pair of tags for each call:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>"""


def describes_tools(template: str | None) -> bool:
    """Whether a chat template describes tools and writes calls in the form of `call_form`."""
    return template is not None and OPEN in template and "tools" in template


def uses_tools(message: Message) -> bool:
    """Whether a message is the result of a call, or makes one."""
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def tools_as_text(messages: Sequence[Message], functions: Sequence[Function]) -> list[dict[str, Any]]:
    """The conversation with tools, calls and results written as text of the system, the assistant and the user.

    Contents must be strings. Results that follow each other or precede a user message become one message, because some
    templates demand that user and assistant take turns.
    """
    plain: list[dict[str, Any]] = []
    before = ""
    for message in messages:
        text = _without_tools(message)
        if "tool" in (message["role"], before) and plain and text["role"] == plain[-1]["role"]:
            plain[-1] = {**plain[-1], "content": f"{plain[-1]['content']}\n{text['content']}"}
        else:
            plain.append(text)
        before = message["role"]
    if not functions:
        return plain
    tools = "\n".join(json.dumps(function.as_tool(), ensure_ascii=False) for function in functions)
    instructions = INSTRUCTIONS.format(tools=tools)
    if plain and plain[0]["role"] in ("system", "developer"):
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{instructions}"}, *plain[1:]]
    return [{"role": "system", "content": instructions}, *plain]


def _without_tools(message: Message) -> dict[str, Any]:
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
