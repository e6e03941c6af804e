"""The two tool-call formats of Mistral's models, the newer one last:

[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]
[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from router.text.answer_grammar import literal, rule
from router.text.calls.format import (
    BLANK,
    PROBE_NAME,
    CallFormat,
    Message,
    Spell,
    Wanted,
    answer_rules,
    bodies,
    free,
    json_call,
    member,
    opening,
    row,
)
from router.text.calls.scanner import (
    OBJECT_HEAD,
    Layout,
    Pattern,
    call_id,
    function_name,
    peek,
    rest_of_object,
    space,
)

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
NAME, ARGUMENTS = '{"name": "', '", "arguments": '
ID_CHARS = 9
"""Chat templates reject call ids that are not exactly 9 letters and digits."""
ID_VALUE = f'/"[a-zA-Z0-9]{{{ID_CHARS}}}"/'
ID = f"({literal(',')} {BLANK} {member(ID_VALUE, 'id')})?"
"""Optional id of a call. Some templates render it."""
LAYOUTS = (
    Layout(
        Pattern(OPEN, space, "[", space, *OBJECT_HEAD),
        Pattern(rest_of_object),
        Pattern(space, ",", space, *OBJECT_HEAD),
        Pattern(space, "]"),
    ),
    Layout(Pattern(OPEN, space, *OBJECT_HEAD), Pattern(rest_of_object)),
    Layout(Pattern(OPEN, space, function_name, ARGS, space, peek("{")), Pattern()),
    Layout(Pattern(OPEN, space, function_name, CALL_ID, call_id, ARGS, space, peek("{")), Pattern()),
    Layout(Pattern(OPEN, space, function_name, space, peek("{")), Pattern()),
)


class MistralFormat(CallFormat):
    """A JSON list after a delimiter, or with `compact`, a delimiter, name and arguments for each call."""

    name = "mistral"
    marks = (OPEN, ARGS, CALL_ID)
    openings = (OPEN,)
    layouts = LAYOUTS

    def __init__(self, *, compact: bool = False) -> None:
        self.compact = compact

    @property
    def rendered_call(self) -> str:
        return rf"\[TOOL_CALLS\]\s*{PROBE_NAME}" if self.compact else rf"\[TOOL_CALLS\]\s*\[(?s:.{{0,80}}){PROBE_NAME}"

    def grammar(self, wanted: Wanted, spell: Spell) -> str:
        before, rules = opening(spell(OPEN))
        if self.compact:
            calls = row(f"{spell(OPEN)} body", "", several=wanted.several)
            numbered = f"({spell(CALL_ID)} /[a-zA-Z0-9]{{{ID_CHARS}}}/)?"
            rules = (rules if free(wanted) else "") + bodies(
                wanted.functions, lambda function, given: f"{literal(function.name)} {numbered} {spell(ARGS)} {given}"
            )
            return answer_rules(wanted, calls, f"{before} body") + rules
        rules = (rules if free(wanted) else "") + rule("listed", _listed(wanted))
        rules += bodies(
            wanted.functions,
            lambda function, arguments: json_call(function.name, ("arguments",), arguments, ID),
        )
        # Only one list: models are not trained to write another one after further text.
        return answer_rules(wanted, f"{spell(OPEN)} listed", f"{before} listed") + rules

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        if self.compact:
            return "".join([f"{OPEN}{name}{ARGS}{arguments}" for name, arguments in calls])
        return f"{OPEN} [{', '.join([f'{NAME}{name}{ARGUMENTS}{arguments}}}' for name, arguments in calls])}]"

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Replace call ids with ids that the templates accept. Equal ids stay equal."""
        return [_with_short_ids(message) for message in messages]


def _listed(wanted: Wanted) -> str:
    between = f"{literal(',')} {BLANK}"
    return f"{BLANK} {literal('[')} {row('body', between, several=wanted.several)} {literal(']')}"


def _with_short_ids(message: Message) -> dict[str, Any]:
    changed = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short(message["tool_call_id"])
    if message.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": _short(str(call.get("id") or ""))} for call in message["tool_calls"]]
    return changed


def _short(number: str) -> str:
    if len(number) == ID_CHARS and number.isascii() and number.isalnum():
        return number
    return hashlib.sha256(number.encode()).hexdigest()[:ID_CHARS]
