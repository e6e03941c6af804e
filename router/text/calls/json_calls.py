"""Base class of formats that write calls as JSON, each or in a list, between delimiters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from router.text.answer_grammar import literal, rule
from router.text.calls.format import (
    GAP,
    PROBE_NAME,
    CallFormat,
    Spell,
    Wanted,
    answer_rules,
    bodies,
    free,
    json_call,
    member,
    opening,
    row,
)
from router.text.calls.scanner import (
    Layout,
    Pattern,
    PatternPart,
    late_name,
    late_object_head,
    object_head,
    rest_of_object,
    short_string,
    space,
)

Delimiters = tuple[tuple[str, ...], str]
"""The texts before calls, between which white space may stand, and the text after them, or ""."""
ID = r'/"[a-zA-Z0-9_.:-]{1,64}"/'


@dataclass(frozen=True, slots=True)
class JSONSyntax:
    """How a family writes its calls.

    `delimiters` enclose a call or, with `is_list`, a list of calls. The model writes the first pair; the scanner also
    accepts the `others`. `argument_keys` are names of the member with the arguments, the usual one first. `id_key` is
    the name of an optional member before the function's name. With `any_order`, the model may also write arguments
    before the name, which the scanner always accepts. `gaps` are white space as the model writes it: between
    delimiters and JSON, before each item of a list, and after the last one.
    """

    delimiters: Delimiters
    others: tuple[Delimiters, ...] = ()
    is_list: bool = False
    name_key: str = "name"
    argument_keys: tuple[str, ...] = ("arguments",)
    id_key: str = ""
    any_order: bool = False
    gaps: tuple[str, str, str] = ("", "", "")


class JSONFormat(CallFormat):
    """Calls in a `JSONSyntax`. The scanner accepts both a single call and a list between all delimiters."""

    syntax: JSONSyntax

    def __init__(self) -> None:
        pairs = (self.syntax.delimiters, *self.syntax.others)
        texts = dict.fromkeys(text for first, last in pairs for text in (*first, last))
        self.marks = tuple(text for text in texts if text.startswith("<"))
        self.openings = tuple(dict.fromkeys(first[0] for first, _ in pairs if first))
        self.layouts = [layout for pair in pairs for layout in self._layouts(*pair)]

    def _layouts(self, first: Sequence[str], last: str) -> list[Layout]:
        opened: list[str | PatternPart] = [part for mark in first for part in (mark, space)]
        layouts = []
        for head, late in self._heads():
            tail: list[str | PatternPart] = [rest_of_object, *((space, last) if last else ())]
            layouts += [
                Layout(Pattern(*opened, *head), Pattern(*tail), late=late),
                Layout(
                    Pattern(*opened, "[", space, *head),
                    Pattern(rest_of_object),
                    Pattern(space, ",", space, *head),
                    Pattern(space, "]"),
                    last,
                    late,
                ),
            ]
        return layouts

    def _heads(self) -> list[tuple[tuple[str | PatternPart, ...], Pattern | None]]:
        """Return the ways to write a call up to its arguments, each with the name after them, if it is there."""
        syntax = self.syntax
        keys = dict.fromkeys((*syntax.argument_keys, "arguments", "parameters"))
        heads = [(object_head(syntax.name_key, *keys), None), (late_object_head(*keys), late_name(syntax.name_key))]
        if syntax.id_key:
            member = (f'"{syntax.id_key}"', space, ":", space, short_string, space, ",", space)
            heads.append((object_head(syntax.name_key, *keys, before=member), None))
        return heads

    @property
    def rendered_call(self) -> str:
        syntax = self.syntax
        first, last = syntax.delimiters
        opened = r"\s*".join(map(_quoted, first)) + (r"\s*\[" if syntax.is_list else "")
        member = r"(?s:[^{}]{0,80})" if syntax.id_key else r"\s*"
        name = rf'\{{{member}"{syntax.name_key}":\s*"{PROBE_NAME}"'
        return rf"{opened}\s*{name}" + (rf"(?s:.{{0,400}}?){_quoted(last)}" if last else "")

    def grammar(self, wanted: Wanted, spell: Spell) -> str:
        syntax = self.syntax
        (first, *more), last = syntax.delimiters
        opened = self._spelled(first, spell)
        before, rules = opening(opened)
        rules = rules if free(wanted) else ""
        begin = f"{' '.join([f'{GAP} {self._spelled(mark, spell)}' for mark in more])} {GAP}"
        end = f"{GAP} {self._spelled(last, spell)}" if last else ""
        rules += bodies(wanted.functions, lambda function, arguments: self._call(function.name, arguments))
        if syntax.is_list:
            listed = row(f"{GAP} body {GAP}", literal(","), several=wanted.several)
            rules += rule("listed", f"{begin} {literal('[')} {listed} {literal(']')} {end}")
            return answer_rules(wanted, f"{opened} listed", f"{before} listed", self.silent(spell)) + rules
        rules += rule("one", f"{begin} body {end}")
        calls = row(f"{opened} one", GAP, several=wanted.several)
        return answer_rules(wanted, calls, f"{before} one") + rules

    def _spelled(self, text: str, spell: Spell) -> str:
        return spell(text) if text in self.marks else literal(text)

    def _call(self, name: str, arguments: str) -> str:
        syntax = self.syntax
        before = f"({member(ID, syntax.id_key)} {literal(',')} {GAP})?" if syntax.id_key else ""
        call = json_call(name, syntax.argument_keys, arguments, name_key=syntax.name_key, before=before, gap=GAP)
        if not syntax.any_order:
            return call
        given, named = member(arguments, syntax.argument_keys[0]), member(literal(json.dumps(name)), syntax.name_key)
        return f"{call} | {literal('{')} {GAP} {given} {literal(',')} {GAP} {named} {GAP} {literal('}')}"

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        syntax = self.syntax
        first, last = syntax.delimiters
        outer, before, after = syntax.gaps
        texts = []
        for i, (name, arguments) in enumerate(calls):
            number = f'"{syntax.id_key}": "{i}", ' if syntax.id_key else ""
            called = f'"{syntax.name_key}": {json.dumps(name)}, "{syntax.argument_keys[0]}": {arguments}'
            texts.append(f"{before}{{{number}{called}}}")
        opened, closed = f"{''.join(first)}{outer}", f"{outer}{last}" if last else ""
        if syntax.is_list:
            return f"{opened}[{(',' if before else ', ').join(texts)}{after}]{closed}"
        return "\n".join([f"{opened}{text}{closed}" for text in texts])


def _quoted(text: str) -> str:
    return "".join([f"\\{char}" if char in r"\.^$*+?{}[]|()" else char for char in text])
