"""The tool-call format of MiniMax since M2, with one pair of outer tags around consecutive calls:

<minimax:tool_call>
<invoke name="get_weather">
<parameter name="city">Paris</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from router.text.answer_grammar import literal
from router.text.calls.format import BREAK, PROBE_NAME, Spell, Wanted, row
from router.text.calls.qwen_coder import END_PARAMETER
from router.text.calls.scanner import Layout, Pattern, PatternPart, function_name, peek_one_of, space
from router.text.calls.tagged import ArgumentTags, TaggedFormat

OPEN, CLOSE, INVOKE, END_INVOKE = "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', "</invoke>"
PARAMETER = '<parameter name="'


class MiniMaxFormat(TaggedFormat):
    name = "minimax"
    marks = (OPEN, CLOSE)
    rendered_call = rf'{OPEN}\s*{INVOKE}{PROBE_NAME}">'
    openings = (OPEN,)
    tags = ArgumentTags(PARAMETER, '">', "", END_PARAMETER)
    _begun: ClassVar[tuple[str | PatternPart, ...]] = (
        *(space, INVOKE, function_name, '">', space),
        peek_one_of(PARAMETER, END_INVOKE),
    )
    layouts = (Layout(Pattern(OPEN, *_begun), Pattern(space, END_INVOKE), Pattern(*_begun), Pattern(space, CLOSE)),)

    def called(self, name: str, arguments: str, spell: Spell) -> str:
        return f"{BREAK} {literal(f'{INVOKE}{name}{chr(34)}>')} {BREAK} {arguments} {literal(END_INVOKE)}"

    def rows(self, wanted: Wanted, spell: Spell) -> tuple[str, str]:
        listed = f"{row('body', '', several=wanted.several)} {BREAK} {spell(CLOSE)}"
        return f"{spell(OPEN)} {listed}", listed

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        texts = []
        for name, arguments in calls:
            given = [f'{PARAMETER}{key}">{value}{END_PARAMETER}\n' for key, value in self.texts(arguments)]
            texts.append(f'{INVOKE}{name}">\n{"".join(given)}{END_INVOKE}\n')
        return f"{OPEN}\n{''.join(texts)}{CLOSE}"
