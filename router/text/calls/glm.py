"""The tool-call format of GLM, with line breaks since 4.5 and without since 4.7:

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
</tool_call>

<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence

from router.text.answer_grammar import literal
from router.text.calls.format import BREAK, PROBE_NAME, Spell
from router.text.calls.hermes import CLOSE, OPEN
from router.text.calls.scanner import Layout, Pattern, function_name, peek, space
from router.text.calls.tagged import ArgumentTags, TaggedFormat

KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


class GLMFormat(TaggedFormat):
    name = "glm"
    marks = (OPEN, CLOSE, KEY, END_KEY, VALUE, END_VALUE)
    openings = (OPEN,)
    tags = ArgumentTags(KEY, END_KEY, VALUE, END_VALUE)
    layouts = (
        Layout(
            Pattern(OPEN, space, function_name, space, peek(KEY, CLOSE)),
            Pattern(space, CLOSE),
        ),
    )
    rendered_call = rf"{OPEN}\s*{PROBE_NAME}\s*{KEY}"

    def called(self, name: str, arguments: str, spell: Spell) -> str:
        return f"{BREAK} {literal(name)} {BREAK} {arguments}"

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        texts = []
        for name, arguments in calls:
            given = [f"{KEY}{key}{END_KEY}\n{VALUE}{text}{END_VALUE}\n" for key, _, text in self.members(arguments)]
            texts.append(f"{OPEN}{name}\n{''.join(given)}{CLOSE}")
        return "\n".join(texts)
