"""The tool-call format of xLAM, a JSON list without delimiters:

[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]
"""

from __future__ import annotations

import json

from router.text.answer_grammar import literal
from router.text.calls.format import GAP, Spell, Wanted, answer_rules, bodies, free, row, text_up_to, unmarked
from router.text.calls.json_calls import Delimiters, JSONFormat, JSONSyntax

OTHERS: tuple[Delimiters, ...] = (
    *((("```json",), "```"), (("```",), "```")),
    *((("<tool_call>",), "</tool_call>"), (("[TOOL_CALLS]",), "")),
)


class XLAMFormat(JSONFormat):
    """A JSON list of calls of known functions. The scanner also reads it in a code block or after a tag."""

    name = "xlam"
    is_unmarked = True
    syntax = JSONSyntax(((), ""), OTHERS, is_list=True)

    def __init__(self) -> None:
        super().__init__()
        self.openings = ("[", *self.openings)
        self.layouts = [layout for i, layout in enumerate(self.layouts) if i % 2]  # lists only

    def grammar(self, wanted: Wanted, spell: Spell) -> str:
        rules = bodies(wanted.functions, lambda function, arguments: self._call(function.name, arguments))
        if not free(wanted):
            listed = row(f"{GAP} body {GAP}", literal(","), several=wanted.several)
            return answer_rules(wanted, f"{literal('[')} {listed} {literal(']')}", "") + rules
        more = f"({literal(',')} {GAP} body {GAP})*" if wanted.several else ""
        rest = f"{GAP} {literal('}')} {GAP} {more} {literal(']')}"
        begun, heads = unmarked(wanted.functions, _head, rest, gap=GAP)
        return answer_rules(wanted, "", begun) + heads + rules


def _head(name: str) -> str:
    return text_up_to("[", "{", '"name"', ":", json.dumps(name), ",", '"arguments"', ":")
