"""The tool-call format of Llama 3 and 4. It has no delimiter unless the model writes `<|python_tag|>` first:

{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from router.text.answer_grammar import is_special, literal, rule
from router.text.calls.format import (
    BLANK,
    PROBE_NAME,
    CallFormat,
    Function,
    Spell,
    Wanted,
    answer_rules,
    bodies,
    free,
    json_call,
    row,
)
from router.text.calls.pythonic import END, START
from router.text.calls.scanner import BLANKS, OBJECT_HEAD, Layout, MarkedScanner, Pattern, rest_of_object, space

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
    rendered_call = rf'(<\|python_\w+\|>)*\{{"name":\s*"{PROBE_NAME}",\s*"parameters":'

    def scanner(
        self, *, start: int, only_calls: bool, functions: Mapping[str, Function], thoughts: bool = True
    ) -> MarkedScanner:
        return MarkedScanner((TAG, "{"), LAYOUTS, start=start, only_calls=only_calls, names=functions)

    def grammar(self, wanted: Wanted, spell: Spell) -> str:
        tag = spell(TAG)
        tagged = f"{tag}? " if is_special(tag) else ""
        between = f"({literal(BETWEEN)})?"
        calls = row("call", between, several=wanted.several)
        more = f" ({between} call)*" if wanted.several else ""
        if not free(wanted):
            rules = rule("call", "body")
            silent = self.silent(spell)
            empty = f"({' '.join(silent)})? " if silent else ""
            return (
                answer_rules(wanted, f"{empty}{tagged}{calls}", "")
                + rules
                + bodies(wanted.functions, lambda function, given: json_call(function.name, ("parameters",), given))
            )
        openings = " | ".join(
            f"open_{i} {BLANK} arguments_{i} {literal('}')}{more}" for i in range(len(wanted.functions))
        )
        begun = f"TEXT {tag} call{more} | {openings}" if tagged else openings
        rules = rule("call", "body") if tagged or more else ""
        for i, function in enumerate(wanted.functions):
            rules += rule(f"open_{i}[lazy]", f"TEXT {_head(function)}")
        return (
            answer_rules(wanted, "", begun, self.silent(spell))
            + rules
            + bodies(wanted.functions, lambda function, given: json_call(function.name, ("parameters",), given))
        )

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        return BETWEEN.join([f"{NAME}{name}{ARGUMENTS}{arguments}}}" for name, arguments in calls])


def _head(function: Function) -> str:
    """Return a lexeme for the beginning of a call within text, with the white space that the scanner allows."""
    words = ("{", '"name"', ":", f'"{function.name}"', ",", '"parameters"', ":")
    return f"/{BLANKS.join(map(re.escape, words))}/"
