"""Forms with a pair of tags for each argument, whose text is no JSON: those of Qwen3-Coder, of GLM and of MiniMax.

<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
</tool_call>

<minimax:tool_call>
<invoke name="get_weather">
<parameter name="city">Paris</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from router.text.answer.grammar import literal, rule
from router.text.calls.form import CallForm, Spell, Wanted, answer_rules, free, opening, row
from router.text.calls.function import Function
from router.text.calls.pattern import Part, Pattern, function_name, peek_one_of, space
from router.text.calls.scanner import Layout
from router.text.calls.tagged_grammar import TaggedRules
from router.text.calls.tagged_scanner import ArgumentTags, TaggedScanner
from router.text.calls.tagged_value import as_text

TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER = "<function=", "</function>", "<parameter=", "</parameter>"
KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
MINIMAX, END_MINIMAX, INVOKE, END_INVOKE = "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', "</invoke>"
NAMED = '<parameter name="'


class TaggedForm(CallForm):
    """What these forms share. `openings` begin a call, in one of the `layouts`."""

    openings: ClassVar[tuple[str, ...]]
    layouts: ClassVar[Sequence[Layout]]
    tags: ClassVar[ArgumentTags]

    def scanner(
        self, *, start: int, only_calls: bool, functions: Mapping[str, Function], thoughts: bool = True
    ) -> TaggedScanner:
        return TaggedScanner(self.openings, self.layouts, self.tags, functions, start=start, only_calls=only_calls)

    def grammar(self, wanted: Wanted, spell: Spell) -> str:
        rules = TaggedRules(self.tags, spell, self.marks)
        bodies = []
        for i, function in enumerate(wanted.functions):
            rules.arguments(f"arguments_{i}", function.arguments)
            bodies.append(self.called(function.name, f"arguments_{i}", spell))
        before, more = opening(spell(self.openings[0]))
        rest = rules.text + rule("body", " | ".join(bodies)) + (more if free(wanted) else "")
        calls, one = self.rows(wanted, spell)
        return answer_rules(wanted, calls, f"{before} {one}") + rest

    @abstractmethod
    def called(self, name: str, arguments: str, spell: Spell) -> str:
        """The right side of the rule `body`, for a call of one function."""

    def rows(self, wanted: Wanted, spell: Spell) -> tuple[str, str]:
        """Right sides of rules: an answer of nothing but calls; and what follows the tag that opens one.

        Here each call is between the first two marks.
        """
        first, last, *_ = map(spell, self.marks)
        call = f"body {last}"
        return row(f"{first} {call}", f"{literal(chr(10))}?", several=wanted.several), call


class QwenCoderForm(TaggedForm):
    """Qwen3-Coder's; it may forget the outer tags."""

    name = "qwen3-coder"
    marks = (TOOL_CALL, END_TOOL_CALL)
    openings = (TOOL_CALL, FUNCTION)
    tags = ArgumentTags(PARAMETER, ">", "", END_PARAMETER, lined=True)
    _begun: ClassVar[tuple[str | Part, ...]] = (
        *(FUNCTION, function_name, ">", space),
        peek_one_of(PARAMETER, END_FUNCTION),
    )
    _tail, _again, _close = Pattern(space, END_FUNCTION), Pattern(space, *_begun), Pattern(space, END_TOOL_CALL)
    layouts = (
        Layout(Pattern(TOOL_CALL, space, *_begun), _tail, _again, _close),
        Layout(Pattern(*_begun), _tail, _again, _close),
    )

    def called(self, name: str, arguments: str, spell: Spell) -> str:
        return f"{literal(f'{chr(10)}{FUNCTION}{name}>{chr(10)}')} {arguments} {literal(f'{END_FUNCTION}{chr(10)}')}"

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        texts = []
        for name, arguments in calls:
            given = [f"{PARAMETER}{key}>\n{value}\n{END_PARAMETER}\n" for key, value in _texts(arguments)]
            texts.append(f"{TOOL_CALL}\n{FUNCTION}{name}>\n{''.join(given)}{END_FUNCTION}\n{END_TOOL_CALL}")
        return "\n".join(texts)


class GLMForm(TaggedForm):
    """GLM's, since 4.5."""

    name = "glm"
    marks = (TOOL_CALL, END_TOOL_CALL, KEY, END_KEY, VALUE, END_VALUE)
    openings = (TOOL_CALL,)
    tags = ArgumentTags(KEY, END_KEY, VALUE, END_VALUE)
    layouts = (
        Layout(
            Pattern(TOOL_CALL, space, function_name, space, peek_one_of(KEY, END_TOOL_CALL)),
            Pattern(space, END_TOOL_CALL),
        ),
    )

    def called(self, name: str, arguments: str, spell: Spell) -> str:
        return f"{literal(f'{name}{chr(10)}')} {arguments}"

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        texts = []
        for name, arguments in calls:
            given = [f"{KEY}{key}{END_KEY}\n{VALUE}{value}{END_VALUE}\n" for key, value in _texts(arguments)]
            texts.append(f"{TOOL_CALL}{name}\n{''.join(given)}{END_TOOL_CALL}")
        return "\n".join(texts)


class MiniMaxForm(TaggedForm):
    """MiniMax's, since M2: one pair of outer tags for all calls of a row."""

    name = "minimax"
    marks = (MINIMAX, END_MINIMAX)
    openings = (MINIMAX,)
    tags = ArgumentTags(NAMED, '">', "", END_PARAMETER)
    _begun: ClassVar[tuple[str | Part, ...]] = (
        *(space, INVOKE, function_name, '">', space),
        peek_one_of(NAMED, END_INVOKE),
    )
    layouts = (
        Layout(Pattern(MINIMAX, *_begun), Pattern(space, END_INVOKE), Pattern(*_begun), Pattern(space, END_MINIMAX)),
    )

    def called(self, name: str, arguments: str, spell: Spell) -> str:
        head, end = f'{INVOKE}{name}">\n', f"{END_INVOKE}\n"
        return f"{literal(head)} {arguments} {literal(end)}"

    def rows(self, wanted: Wanted, spell: Spell) -> tuple[str, str]:
        listed = f"{literal(chr(10))} {row('body', '', several=wanted.several)} {spell(END_MINIMAX)}"
        return f"{spell(MINIMAX)} {listed}", listed

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        texts = []
        for name, arguments in calls:
            given = [f'{NAMED}{key}">{value}{END_PARAMETER}\n' for key, value in _texts(arguments)]
            texts.append(f'{INVOKE}{name}">\n{"".join(given)}{END_INVOKE}\n')
        return f"{MINIMAX}\n{''.join(texts)}{END_MINIMAX}"


def _texts(arguments: str) -> list[tuple[str, str]]:
    """The members of arguments in JSON; none of what is no object."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return []
    return [(key, as_text(value)) for key, value in given.items()] if isinstance(given, dict) else []
