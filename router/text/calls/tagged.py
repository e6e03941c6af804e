"""Base of the formats that write each argument as plain text between tags."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from router.text.answer_grammar import rule
from router.text.calls.form import BREAK, CallForm, Spell, Wanted, answer_rules, free, opening, row
from router.text.calls.function import Function
from router.text.calls.scanner import Layout
from router.text.calls.tagged_grammar import TaggedRules
from router.text.calls.tagged_scanner import ArgumentTags, TaggedScanner
from router.text.calls.tagged_value import as_text


class TaggedForm(CallForm):
    """A format with tags around each argument. `openings` begin a call, in one of the `layouts`."""

    openings: ClassVar[tuple[str, ...]]
    layouts: ClassVar[Sequence[Layout]]
    tags: ClassVar[ArgumentTags]
    reads_schemas = True

    def scanner(
        self, *, start: int, only_calls: bool, functions: Mapping[str, Function], thoughts: bool = True
    ) -> TaggedScanner:
        return TaggedScanner(self.openings, self.layouts, self.tags, functions, start=start, only_calls=only_calls)

    def grammar(self, wanted: Wanted, spell: Spell) -> str:
        rules = TaggedRules(self.tags, spell, self.marks)
        bodies = []
        for i, function in enumerate(wanted.functions):
            rules.arguments(f"arguments_{i}", function.shapes)
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
        return row(f"{first} {call}", BREAK, several=wanted.several), call

    def texts(self, arguments: str) -> list[tuple[str, str]]:
        """Return the members of arguments in JSON, each with the text of its value; empty if they are not an object."""
        try:
            given = json.loads(arguments)
        except (ValueError, RecursionError):
            return []
        if not isinstance(given, dict):
            return []
        return [(key, as_text(value, python=self.tags.python)) for key, value in given.items()]
