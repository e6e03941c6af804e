"""The tool-call format of Qwen3-Coder. White space is part of values. The model may omit the outer tags:

<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence

from router.text.answer_grammar import literal
from router.text.calls.format import BREAK, PROBE_NAME, Spell
from router.text.calls.hermes import CLOSE, OPEN
from router.text.calls.scanner import Layout, Pattern, PatternPart, function_name, peek, space
from router.text.calls.tagged import ArgumentTags, TaggedFormat

FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER = "<function=", "</function>", "<parameter=", "</parameter>"
BEGUN: tuple[str | PatternPart, ...] = (FUNCTION, function_name, ">", space, peek(PARAMETER, END_FUNCTION))


def function_layouts(opened: str, closed: str) -> tuple[Layout, Layout]:
    """Return the layouts with both outer tags, and without the opening tag."""
    tail, again, close = Pattern(space, END_FUNCTION), Pattern(space, *BEGUN), Pattern(space, closed)
    return Layout(Pattern(opened, space, *BEGUN), tail, again, close), Layout(Pattern(*BEGUN), tail, again, close)


class QwenCoderFormat(TaggedFormat):
    name = "qwen3-coder"
    marks = (OPEN, CLOSE)
    openings: tuple[str, ...] = (OPEN, FUNCTION)
    tags = ArgumentTags(PARAMETER, ">", "", END_PARAMETER, lined=True, python=True)
    layouts = function_layouts(OPEN, CLOSE)
    rendered_call = rf"{FUNCTION}{PROBE_NAME}>"

    def called(self, name: str, arguments: str, spell: Spell) -> str:
        return f"{BREAK} {literal(f'{FUNCTION}{name}>')} {BREAK} {arguments} {literal(END_FUNCTION)} {BREAK}"

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        opened, closed = self.marks
        line = "\n" if self.tags.lined else ""
        texts = []
        for name, arguments in calls:
            given = [
                f"{PARAMETER}{key}>{line}{text}{line}{END_PARAMETER}\n" for key, _, text in self.members(arguments)
            ]
            texts.append(f"{opened}\n{FUNCTION}{name}>\n{''.join(given)}{END_FUNCTION}\n{closed}")
        return "\n".join(texts)
