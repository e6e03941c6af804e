"""Conversion of messages from the forms of OpenAI's API to those that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import InvalidRequest
from common.model_files import ContentForm
from router.text.json_values import ValueCounter

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class JoinedParts(str):
    """Texts of several content parts (`parts`), joined by line breaks as in vLLM."""

    parts: tuple[str, ...]

    @classmethod
    def of(cls, texts: Sequence[str]) -> str:
        """Join texts. A single text becomes a plain string."""
        if len(texts) == 1:
            return texts[0]
        joined = cls("\n".join(texts))
        joined.parts = tuple(texts)
        return joined


def template_messages(messages: Sequence[Mapping[str, Any]], *, has_developer: bool = False) -> list[dict[str, Any]]:
    """Convert messages: content becomes one string (`JoinedParts` for several parts), call arguments become objects.

    A "developer" message becomes a "system" message unless the template supports that role. Raises InvalidRequest for
    content that is not text, and for arguments with too many JSON values.
    """
    counter = ValueCounter("messages: the arguments of tool calls have", param="messages")
    return [_message(message, index, has_developer, counter) for index, message in enumerate(messages)]


def in_content_forms(messages: Sequence[dict[str, Any]], forms: Mapping[str, ContentForm]) -> list[dict[str, Any]]:
    """Convert messages from `template_messages` to the content form that a template renders.

    Content of several parts becomes a list for roles whose parts the template joins itself, and stays one string for
    others. If the template supports only lists, all content becomes a list.
    """
    return [_in_form(message, forms.get(message["role"], ContentForm.TEXT)) for message in messages]


def _in_form(message: dict[str, Any], form: ContentForm) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, JoinedParts) and form is not ContentForm.TEXT:
        texts = content.parts
    elif isinstance(content, str) and form is ContentForm.PARTS:
        texts = (content,) if content else ()
    else:
        return message
    return {**message, "content": [{"type": "text", "text": text} for text in texts]}


def _message(message: Mapping[str, Any], index: int, has_developer: bool, counter: ValueCounter) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = content_text(message.get("content"), index)
    if plain.get("role") == "developer" and not has_developer:
        plain["role"] = "system"
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], index, counter)
    return plain


def content_text(content: Any, index: int) -> str:
    """Return the text of a message's content, which is a string, null, or text parts (`JoinedParts`)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _refused(index, f"is of type {type(content).__name__}: send a string or a list of text parts")
    return JoinedParts.of([_part_text(part, index) for part in content])


def _part_text(part: Any, index: int) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise _refused(index, f"has a part of type {type(part).__name__}: send objects of type 'text'")
    kind = str(part.get("type", "text"))
    text = part.get(TEXT_PARTS.get(kind, ""))
    if not isinstance(text, str):
        raise _refused(index, f"has a part of type {kind[:40]!r}: this model supports only text")
    return text


def _refused(index: int, reason: str) -> InvalidRequest:
    return InvalidRequest(f"messages[{index}].content {reason}", param=f"messages[{index}].content")


def _tool_calls(calls: Any, index: int, counter: ValueCounter) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or not all(
        isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) for call in calls
    ):
        param = f"messages[{index}].tool_calls"
        raise InvalidRequest(f"{param} must be a list of function calls", param=param)
    return [_tool_call(call, counter) for call in calls]


def _tool_call(call: Mapping[str, Any], counter: ValueCounter) -> dict[str, Any]:
    """Parse the arguments, which templates render with `tojson`. Anything but a JSON object stays text."""
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        counter.add_text(arguments)
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
        function["arguments"] = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": function}
