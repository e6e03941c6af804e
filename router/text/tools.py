"""Tools as text, for models whose chat template does not support tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from router.text.calls import CallFormat, Function
from router.text.calls.format import Message

INSTRUCTIONS = """\
You can call these functions, each described by a line of JSON:
<tools>
{tools}
</tools>
{how}"""
WITH_TAGS = """\
To call a function, write its name and arguments as JSON between tool_call tags, a pair of tags for each call:
<tool_call>
{"name": "the function's name", "arguments": {"an argument's name": "its value"}}
</tool_call>"""
IN_FORM = """\
To call a function, write its name and arguments in the form of this example of two calls:
{example}"""
EXAMPLE = [("first_function", '{"argument": "value"}'), ("second_function", "{}")]


def uses_tools(message: Message) -> bool:
    """Whether a message is a call's result or contains calls."""
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def tools_as_text(
    messages: Sequence[Message], functions: Sequence[Function], call_format: CallFormat
) -> list[dict[str, Any]]:
    """Convert tools, calls and results to text in system, assistant and user messages.

    Contents must be strings. Consecutive results, and results followed by a user message, are merged into one message,
    because some templates require that user and assistant messages alternate.
    """
    joined: list[tuple[dict[str, Any], list[str]]] = []  # messages, each with its contents
    before = ""
    for message in messages:
        text = _without_tools(message, call_format)
        if "tool" in (message["role"], before) and joined and text["role"] == joined[-1][0]["role"]:
            joined[-1][1].append(text["content"])
        else:
            joined.append((text, [text["content"]]))
        before = message["role"]
    plain = [{**message, "content": "\n".join(contents)} for message, contents in joined]
    if not functions:
        return plain
    tools = "\n".join(json.dumps(function.as_tool(), ensure_ascii=False) for function in functions)
    how = WITH_TAGS if call_format.name == "hermes" else IN_FORM.format(example=call_format.written(EXAMPLE))
    instructions = INSTRUCTIONS.format(tools=tools, how=how)
    if plain and plain[0]["role"] in ("system", "developer"):
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{instructions}"}, *plain[1:]]
    return [{"role": "system", "content": instructions}, *plain]


def _without_tools(message: Message, call_format: CallFormat) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    texts = [message["content"]] if message["content"] else []
    if message.get("tool_calls"):
        texts.append(call_format.written_calls(message))
    return rest | {"content": "\n".join(texts)}
