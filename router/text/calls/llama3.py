"""The tool-call format of Llama 3 and 4. It has no delimiter unless the model writes `<|python_tag|>` first:

{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from router.text.answer_grammar import is_special, literal
from router.text.calls.format import (
    BLANK,
    PROBE_NAME,
    CallFormat,
    Spell,
    Wanted,
    answer_rules,
    bodies,
    free,
    json_call,
    row,
    text_up_to,
    unmarked,
)
from router.text.calls.pythonic import END, START
from router.text.calls.scanner import OBJECT_HEAD, Layout, Pattern, rest_of_object, space

TAG = "<|python_tag|>"
NAME, ARGUMENTS, BETWEEN = '{"name": "', '", "parameters": ', "; "
TYPED_HEAD = ("{", space, '"type"', space, ":", space, '"function"', space, ",", space, *OBJECT_HEAD[1:])
LAYOUTS = [
    Layout(Pattern(*tag, *head), Pattern(rest_of_object), Pattern(space, ";", space, *head))
    for tag in ((TAG, space), ())
    for head in (OBJECT_HEAD, TYPED_HEAD)
]


class Llama3Format(CallFormat):
    """JSON objects whose `name` is that of a function, separated by semicolons."""

    name = "llama3"
    is_unmarked = True
    marks = (TAG,)
    silent_marks = (START, END)
    """Llama 4's template writes them around the text before calls."""
    openings = (TAG, "{")
    layouts = LAYOUTS
    rendered_call = rf'(<\|python_\w+\|>)*\{{"name":\s*"{PROBE_NAME}",\s*"parameters":'

    def grammar(self, wanted: Wanted, spell: Spell) -> str:
        tag, silent = spell(TAG), self.silent(spell)
        between = f"({literal(BETWEEN)})?"
        rules = bodies(wanted.functions, lambda function, given: json_call(function.name, ("parameters",), given))
        if not free(wanted):
            before = (f"({' '.join(silent)})? " if silent else "") + (f"{tag}? " if is_special(tag) else "")
            return answer_rules(wanted, f"{before}{row('body', between, several=wanted.several)}", "") + rules
        more = f"({between} body)*" if wanted.several else ""
        begun, heads = unmarked(wanted.functions, _head, f"{literal('}')} {more}", gap=BLANK)
        if is_special(tag):
            begun = f"TEXT {tag} body {more} | {begun}"
        return answer_rules(wanted, "", begun, silent) + heads + rules

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        return BETWEEN.join([f"{NAME}{name}{ARGUMENTS}{arguments}}}" for name, arguments in calls])


def _head(name: str) -> str:
    return text_up_to("{", '"name"', ":", json.dumps(name), ",", '"parameters"', ":")
