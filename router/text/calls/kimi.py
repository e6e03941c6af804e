"""The form of Kimi K2, whose calls have their ids in them; a conversation counts them from 0:

<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}\
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from router.text.answer.grammar import literal, rule
from router.text.calls.form import CallForm, Message, Spell, Wanted, answer_rules, bodies, free, opening, row
from router.text.calls.function import Function
from router.text.calls.pattern import Pattern, function_name, peek, space
from router.text.calls.scanner import Layout, MarkedScanner

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
PREFIX = "functions."
CALL = (BEGIN, space, PREFIX, function_name, ":", function_name, space, ARGUMENTS, space, peek("{"))
TAIL, AGAIN, LAST = Pattern(space, END), Pattern(space, *CALL), Pattern(space, CLOSE)
LAYOUTS = (Layout(Pattern(OPEN, space, *CALL), TAIL, AGAIN, LAST), Layout(Pattern(*CALL), TAIL, AGAIN, LAST))


class KimiForm(CallForm):
    """Calls between marks, with arguments in JSON, in a section of their own."""

    name = "kimi"
    marks = (OPEN, CLOSE, BEGIN, ARGUMENTS, END)

    def scanner(
        self, *, start: int, only_calls: bool, functions: Mapping[str, Function], thoughts: bool = True
    ) -> MarkedScanner:
        return MarkedScanner((OPEN, BEGIN), LAYOUTS, start=start, only_calls=only_calls)

    def grammar(self, wanted: Wanted, spell: Spell) -> str:
        before, rules = opening(spell(OPEN))
        listed = f"{row('body', '', several=wanted.several)} {spell(CLOSE)}"
        rules = (rules if free(wanted) else "") + rule("listed", listed)
        rules += bodies(wanted.functions, lambda function, arguments: self._body(function, arguments, spell))
        return answer_rules(wanted, f"{spell(OPEN)} listed", f"{before} listed") + rules

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        texts = [f"{BEGIN}{PREFIX}{name}:{i}{ARGUMENTS}{given}{END}" for i, (name, given) in enumerate(calls)]
        return f"{OPEN}{''.join(texts)}{CLOSE}"

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """With ids as the model makes them: its template writes them in place of names."""
        ids: dict[str, str] = {}
        changed = []
        for message in messages:
            made = dict(message)
            if message.get("tool_calls"):
                calls = []
                for call in message["tool_calls"]:
                    call_id = f"{PREFIX}{call['function']['name']}:{len(ids)}"
                    ids[str(call.get("id") or call_id)] = call_id
                    calls.append({**call, "id": call_id})
                made["tool_calls"] = calls
            if isinstance(message.get("tool_call_id"), str):
                made["tool_call_id"] = ids.get(message["tool_call_id"], message["tool_call_id"])
            changed.append(made)
        return changed

    def _body(self, function: Function, arguments: str, spell: Spell) -> str:
        head = f"{spell(BEGIN)} {literal(f'{PREFIX}{function.name}:')} /[0-9]{{1,3}}/"
        return f"{head} {spell(ARGUMENTS)} {arguments} {spell(END)}"
