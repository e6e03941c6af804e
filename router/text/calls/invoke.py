"""Base class of formats that write calls as `<invoke name="...">` elements within one pair of outer tags."""

from __future__ import annotations

from collections.abc import Sequence

from router.text.answer_grammar import rule
from router.text.calls.format import BREAK, PROBE_NAME, Spell, Wanted, opening, row
from router.text.calls.scanner import Layout, Pattern, PatternPart, function_name, peek, space
from router.text.calls.tagged import OTHER, STRING, ArgumentTags, TaggedFormat, spelled


class InvokeFormat(TaggedFormat):
    """The names of all tags but the outer ones begin with `prefix`."""

    prefix = ""
    outer: str
    """Name of the outer tags."""

    def __init__(self) -> None:
        prefix = self.prefix
        self._open, self._close = f"<{prefix}{self.outer}>", f"</{prefix}{self.outer}>"
        self._invoke, self._end_invoke = f'<{prefix}invoke name="', f"</{prefix}invoke>"
        end = '" string="' if prefix else '">'
        self.tags = ArgumentTags(f'<{prefix}parameter name="', end, "", f"</{prefix}parameter>", typed=bool(prefix))
        self.marks = (prefix,) if prefix else (self._open, self._close)
        self.openings = (self._open,)
        begun: tuple[str | PatternPart, ...] = (space, self._invoke, function_name, '">', space)
        begun = (*begun, peek(self.tags.open, self._end_invoke))
        self.layouts = (
            Layout(
                Pattern(self._open, *begun),
                Pattern(space, self._end_invoke),
                Pattern(*begun),
                Pattern(space, self._close),
            ),
        )

    @property
    def rendered_call(self) -> str:
        return rf'{self._open}\s*{self._invoke}{PROBE_NAME}">'

    def opening(self, spell: Spell) -> tuple[str, str]:
        first, *rest = spelled(self._open, self.marks, spell)
        if not rest:
            return opening(first)
        # The text before a special token must end with the beginning of the tag.
        return f"OPENING {' '.join(rest)}", rule("OPENING", f"/(.|\\n)*{self._open[:1]}/")

    def called(self, name: str, arguments: str, spell: Spell) -> str:
        opened = self._spelled(f'{self._invoke}{name}">', spell)
        return f"{BREAK} {opened} {BREAK} {BREAK} {arguments} {self._spelled(self._end_invoke, spell)}"

    def rows(self, wanted: Wanted, spell: Spell) -> tuple[str, str]:
        listed = f"{row('body', '', several=wanted.several)} {BREAK} {self._spelled(self._close, spell)}"
        return f"{self._spelled(self._open, spell)} {listed}", listed

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        texts = []
        for name, arguments in calls:
            given = [
                f"{self.tags.open}{key}{self.tags.key_end}{self._kind(value)}{text}{self.tags.close}\n"
                for key, value, text in self.members(arguments)
            ]
            texts.append(f'{self._invoke}{name}">\n{"".join(given)}{self._end_invoke}\n')
        return f"{self._open}\n{''.join(texts)}{self._close}"

    def _kind(self, value: object) -> str:
        return (STRING if isinstance(value, str) else OTHER) if self.tags.typed else ""

    def _spelled(self, tag: str, spell: Spell) -> str:
        return " ".join(spelled(tag, self.marks, spell))
