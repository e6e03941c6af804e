"""The tool-call format of the Hermes and Qwen families, and of EXAONE 4, which omits the line breaks:

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence

from router.text.answer_grammar import rule
from router.text.calls.format import (
    BREAK,
    PROBE_NAME,
    CallFormat,
    Spell,
    Wanted,
    answer_rules,
    bodies,
    free,
    json_call,
    opening,
    row,
)
from router.text.calls.scanner import OBJECT_HEAD, Layout, Pattern, rest_of_object, space

OPEN, CLOSE = "<tool_call>", "</tool_call>"
NAME, ARGUMENTS, END = '\n{"name": "', '", "arguments": ', "}\n"
LAYOUT = Layout(Pattern(OPEN, space, *OBJECT_HEAD), Pattern(rest_of_object, space, CLOSE))


class HermesFormat(CallFormat):
    """JSON calls, each between a pair of tags."""

    name = "hermes"
    marks = (OPEN, CLOSE)
    openings = (OPEN,)
    layouts = (LAYOUT,)
    rendered_call = rf"<tool_call>\s*\{{(?s:.{{0,80}}){PROBE_NAME}"

    def grammar(self, wanted: Wanted, spell: Spell) -> str:
        before, rules = opening(spell(OPEN))
        calls = row("call", BREAK, several=wanted.several)
        rules = (rules if free(wanted) else rule("call", f"{spell(OPEN)} body")) + bodies(
            wanted.functions,
            lambda function, arguments: (
                f"{BREAK} {json_call(function.name, 'arguments', arguments)} {BREAK} {spell(CLOSE)}"
            ),
        )
        return answer_rules(wanted, calls, f"{before} body") + rules

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        return "\n".join([f"{OPEN}{NAME}{name}{ARGUMENTS}{arguments}{END}{CLOSE}" for name, arguments in calls])
