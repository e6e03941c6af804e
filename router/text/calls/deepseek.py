"""The tool-call formats of DeepSeek V3, with fenced arguments, and of V3.1:

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city": "Paris"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from collections.abc import Sequence

from router.text.answer_grammar import literal
from router.text.calls.format import BREAK, PROBE_NAME, Function, SectionFormat, Spell
from router.text.calls.scanner import Layout, Pattern, function_name, peek, space

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_END = "\n```json\n", "\n```"
FENCED = (BEGIN, "function", SEPARATOR, function_name, space, "```json", space, peek("{"))
PLAIN = (BEGIN, function_name, SEPARATOR, space, peek("{"))
LAYOUTS = [
    Layout(Pattern(*first, *call), Pattern(*tail), Pattern(space, *call), Pattern(space, CLOSE))
    for first in ((OPEN, space), ())
    for call, tail in ((FENCED, (space, "```", space, END)), (PLAIN, (space, END)))
]


class DeepSeekFormat(SectionFormat):
    """DeepSeek's calls. With `fenced`, arguments are in a code block, as V3 writes them."""

    name = "deepseek"
    marks = (OPEN, CLOSE, BEGIN, SEPARATOR, END)
    openings = (OPEN, BEGIN)
    layouts = LAYOUTS

    def __init__(self, *, fenced: bool = False) -> None:
        self.fenced = fenced
        self.between = BREAK if fenced else ""

    @property
    def rendered_call(self) -> str:
        return rf"{SEPARATOR}{PROBE_NAME}\s*```" if self.fenced else rf"{BEGIN}{PROBE_NAME}{SEPARATOR}"

    def body(self, function: Function, arguments: str, spell: Spell) -> str:
        if self.fenced:
            head = f"{literal('function')} {spell(SEPARATOR)} {literal(function.name + FENCE)}"
            return f"{spell(BEGIN)} {head} {arguments} {literal(FENCE_END)} {spell(END)}"
        return f"{spell(BEGIN)} {literal(function.name)} {spell(SEPARATOR)} {arguments} {spell(END)}"

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        if self.fenced:
            texts = [f"{BEGIN}function{SEPARATOR}{name}{FENCE}{given}{FENCE_END}{END}" for name, given in calls]
            return f"{OPEN}{chr(10).join(texts)}{CLOSE}"
        return f"{OPEN}{''.join([f'{BEGIN}{name}{SEPARATOR}{given}{END}' for name, given in calls])}{CLOSE}"
