"""The form of gpt-oss, whose answers are messages in channels, thoughts and calls among them:

<|channel|>analysis<|message|>The user asks for the weather.<|end|><|start|>assistant
<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

without the line break, or <|channel|>final<|message|>Hello! in place of the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from router.text.answer_grammar import json_expression, literal, rule
from router.text.calls.form import TEXT as ANY_TEXT
from router.text.calls.form import CallForm, Message, Spell, Wanted, arguments_rules, opening
from router.text.calls.function import Function
from router.text.calls.harmony_scanner import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    FUNCTIONS,
    MESSAGE,
    RETURN,
    START,
    HarmonyScanner,
)


class HarmonyForm(CallForm):
    """Messages with a channel each. The prompt ends behind `<|start|>assistant`."""

    name = "harmony"
    marks = (CHANNEL, MESSAGE, START, END, CALL, CONSTRAIN, RETURN)
    has_channels = True

    def scanner(
        self, *, start: int, only_calls: bool, functions: Mapping[str, Function], thoughts: bool = True
    ) -> HarmonyScanner:
        return HarmonyScanner(start=start, names=functions, thoughts=thoughts)

    def grammar(self, wanted: Wanted, spell: Spell) -> str:
        """Thoughts and remarks of any text, then a call or, unless one is required, the answer."""
        channel, message, start = spell(CHANNEL), spell(MESSAGE), spell(START)
        json_type = f"({literal(' ')}? {spell(CONSTRAIN)}? {literal('json')})?"
        ended, rules = opening(spell(END), "ended")
        calls = f"({called_rules(wanted, spell)}) {spell(CALL)}?"
        last = ["call"]
        if not wanted.required:
            last.append("final")
            if wanted.answer is None:
                rules += rule("final", f"{channel} {literal('final')} {message} TEXT")
            else:
                rules += rule("final", f"{channel} {literal('final')} {json_type} {message} answer")
                rules += rule("answer", json_expression(wanted.answer))
        rules += rule("start", f"remark* ({' | '.join(last)})")
        kinds = f"({literal('analysis')} | {literal('commentary')})"
        rules += rule("remark", f"{channel} {kinds} {message} {ended} {start} {literal('assistant')}")
        rules += rule("TEXT", ANY_TEXT) + rule("call", calls)
        rules += rule("begun_call", f"{channel} {literal('commentary')}")
        return rules + rule("typed", f"{json_type} {message}") + arguments_rules(wanted.functions)

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        return "".join([f"{CHANNEL}commentary to={FUNCTIONS}{name} {CONSTRAIN}json{MESSAGE}{arguments}{CALL}"
                        for name, arguments in calls])  # fmt: skip

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """With thoughts where the template looks for them."""
        return [_with_thinking(message) for message in messages]


def called_rules(wanted: Wanted, spell: Spell) -> str:
    """The right side of a rule for a call; its head names the function in the channel or before it."""
    behind = [
        f"begun_call {literal(f' to={FUNCTIONS}{function.name}')} typed arguments_{i}"
        for i, function in enumerate(wanted.functions)
    ]
    before = [
        f"{literal(f' to={FUNCTIONS}{function.name}')} begun_call typed arguments_{i}"
        for i, function in enumerate(wanted.functions)
    ]
    return " | ".join(behind + before)


def _with_thinking(message: Message) -> dict[str, Any]:
    """The message with its thought under the template's name; with calls the template takes no text beside it."""
    changed = {key: value for key, value in message.items() if key != "reasoning_content"}
    if thought := message.get("reasoning_content"):
        changed["thinking"] = thought
        if message.get("tool_calls") and message.get("content"):
            changed |= {"thinking": f"{thought}\n{message['content']}", "content": ""}
    return changed
