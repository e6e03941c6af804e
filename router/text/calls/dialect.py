"""Detection of a chat template's tool-call format, by rendering a probe call, and adaptation of messages to it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from common.errors import InvalidRequest
from common.model_files import ChatTemplate
from router.text.calls.format import (
    PROBE_ARGUMENT,
    PROBE_CALL_ID,
    PROBE_NAME,
    PROBE_VALUE,
    CallFormat,
    Function,
    Message,
    arguments_text,
)
from router.text.calls.registry import format_hinted, format_in, format_named

AUTO, NONE = "auto", "none"
PROBE = Function(
    PROBE_NAME,
    "a probe",
    {"type": "object", "properties": {PROBE_ARGUMENT: {"type": "string", "description": "a value"}}},
)
USER = {"role": "user", "content": "hi"}
VALUES = (PROBE_VALUE, "another value")
CALL_IDS = (PROBE_CALL_ID, "probe0002")


@dataclass(frozen=True, slots=True)
class Dialect:
    """Tool-call conventions of a served model.

    `native`: the chat template describes functions and renders calls. Otherwise the prompt does both.
    `text_arguments`: the template expects arguments as JSON text. `single_calls`: it renders at most one call per
    message. `parses`: calls are extracted from answers. `writes_calls`: a native template omits calls, so they are
    written as the message's text. `is_known`: the template shows the format, or it was named.
    """

    format: CallFormat
    _: KW_ONLY
    native: bool = False
    text_arguments: bool = False
    parses: bool = True
    single_calls: bool = False
    writes_calls: bool = False
    is_known: bool = True

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Adapt messages, whose calls have arguments as objects, to a native template."""
        adapted = self.format.messages(messages)
        if self.single_calls:
            adapted = _with_single_calls(adapted)
        if self.writes_calls:
            adapted = [self._with_written_calls(message) for message in adapted]
        return [_with_text_arguments(message) for message in adapted] if self.text_arguments else adapted

    def _with_written_calls(self, message: Message) -> dict[str, Any]:
        if not message.get("tool_calls"):
            return dict(message)
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        return rest | {"content": f"{message.get('content') or ''}{self.format.written_calls(message)}"}


def dialect_of(template: ChatTemplate, parser: str = AUTO) -> Dialect:
    """Detect the dialect of a template. `parser` is the name of a format, `auto` or `none`."""
    found, text_arguments, is_rendered = None, False, False
    source = template.source or ""
    if source:
        for as_text in (False, True):
            rendered = _rendered(template, _conversation(1, as_text))
            is_rendered = is_rendered or PROBE_VALUE in rendered
            found = _format_of(template, rendered)
            if found is not None:
                text_arguments = as_text
                break
    single_calls = found is not None and _takes_single_calls(
        template, Dialect(found, native=True, text_arguments=text_arguments)
    )
    described = bool(source) and PROBE_NAME in _rendered(template, [USER])
    hinted = format_hinted(source) if found is None else None
    if parser in (AUTO, NONE):
        parses = parser == AUTO
        if found is not None:
            return Dialect(
                found, native=described, text_arguments=text_arguments, parses=parses, single_calls=single_calls
            )
        if hinted is None:
            return Dialect(format_named("hermes"), parses=parses, is_known=False)
        written = Dialect(hinted, native=True, parses=parses, writes_calls=True)
        return written if described and _shows_written(template, written) else Dialect(hinted, parses=parses)
    chosen = next((each for each in (found, hinted) if each is not None and each.name == parser), format_named(parser))
    writes = described and not is_rendered
    return Dialect(
        chosen, native=described, text_arguments=text_arguments, single_calls=single_calls, writes_calls=writes
    )


def _format_of(template: ChatTemplate, rendered: str) -> CallFormat | None:
    """Detect the format of a rendered call."""
    found = format_in(rendered)
    if found is None or not found.is_unmarked:
        return found
    call = re.search(found.rendered_call, rendered)
    before, text, _ = _rendered(template, [USER, {"role": "assistant", "content": PROBE_VALUE}]).partition(PROBE_VALUE)
    begun = rendered[: call.start()] if call is not None else ""
    return found if text and "".join(before.split()) == "".join(begun.split()) else None


def _shows_written(template: ChatTemplate, dialect: Dialect) -> bool:
    """Whether a template renders calls that are written as text, and their results."""
    shown = _rendered(template, dialect.messages(_conversation(1, as_text=False)))
    return _format_of(template, shown) is dialect.format and "done" in shown


def _takes_single_calls(template: ChatTemplate, dialect: Dialect) -> bool:
    """Whether a template renders two calls completely only if they are in separate messages."""
    calls = _conversation(2, as_text=False)

    def shows(dialect: Dialect) -> bool:
        shown = _rendered(template, dialect.messages(calls))
        return all(value in shown for value in VALUES)

    return not shows(dialect) and shows(replace(dialect, single_calls=True))


def _conversation(num_calls: int, as_text: bool) -> list[dict[str, Any]]:
    """Create a conversation: a question, `num_calls` calls in one message, and their results."""
    calls, results = [], []
    for call_id, value in zip(CALL_IDS[:num_calls], VALUES, strict=False):
        arguments: Any = {PROBE_ARGUMENT: value}
        function = {"name": PROBE_NAME, "arguments": json.dumps(arguments) if as_text else arguments}
        calls.append({"id": call_id, "type": "function", "function": function})
        results.append({"role": "tool", "content": "done", "tool_call_id": call_id, "name": PROBE_NAME})
    return [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


def _rendered(template: ChatTemplate, messages: list[dict[str, Any]]) -> str:
    try:
        return template.render(messages, tools=[PROBE.as_tool()], add_generation_prompt=False)
    except InvalidRequest:
        return ""


def _with_single_calls(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Split messages into one call each, followed by its result. Other fields stay with the first call."""
    results = {message.get("tool_call_id"): message for message in messages if message["role"] == "tool"}
    placed: set[int] = set()
    plain: list[dict[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            if id(message) not in placed:
                plain.append(dict(message))
            continue
        for number, call in enumerate(calls):
            rest = message if number == 0 else {"role": message["role"], "content": ""}
            plain.append({**rest, "tool_calls": [call]})
            result = results.get(call.get("id"))
            if result is not None and id(result) not in placed:
                placed.add(id(result))
                plain.append(dict(result))
    return plain


def _with_text_arguments(message: Message) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": arguments_text(call["function"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)
