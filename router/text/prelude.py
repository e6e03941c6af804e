"""Text that may precede the form of an answer: a thought between marks, or messages of other channels."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import msgspec

from router.text.answer_grammar import is_special, literal, rule
from router.text.thinking import ThoughtPosition
from router.text.thought_marks import ThoughtMarks

SpellAll = Callable[[str], tuple[str, ...]]
"""Writes a text in a grammar, with each special token in it as a token."""
REGEX_START = "start: "
"""Beginning of a grammar that consists of one regular expression, as llguidance writes it."""
BLANKS = r"/[\s\x1c-\x1f]*/"
"""White space as `str.lstrip` removes it."""


class Prelude(msgspec.Struct, frozen=True):
    """Lark rules for the text before the form, of which the first is `prelude`.

    An answer without it must not begin with white space and the text `barred`, unless that is "".
    """

    rules: str
    is_optional: bool = False
    barred: str = ""

    def before(self, form: str, *, is_regex: bool = False) -> str:
        """Return the grammar of answers that begin with this text and end with the form of another grammar.

        Only a regular expression (`is_regex`) can exclude `barred`. Raises ValueError if the other grammar is invalid.
        """
        grammars = _grammars(form)
        if self.barred and is_regex:
            grammars[0]["lark_grammar"] = _barring(self.barred, grammars[0]["lark_grammar"])
        names = [each.get("name") for each in grammars]
        name = names[0] or next(free for free in map("form{}".format, itertools.count()) if free not in names)
        grammars[0]["name"] = name
        start = rule("start", f"prelude{'?' if self.is_optional else ''} @{name}")
        whole = {"grammars": [{"lark_grammar": start + self.rules}, *grammars]}
        return json.dumps(whole, ensure_ascii=False, separators=(",", ":"))


def thought_prelude(
    marks: ThoughtMarks, position: ThoughtPosition, spell: SpellAll, *, takes_breaks: bool
) -> Prelude | None:
    """Write the rules of a thought that the answer begins or continues, and of the answer's head; None without both.

    A thought is any text without its end mark and without special tokens. With `takes_breaks`, up to two line breaks
    may follow it. A head that is not all special tokens is allowed only with `takes_breaks`, because other forms may
    begin like it.
    """
    heads = spell(marks.head) if marks.head else ()
    head = " ".join(heads) if takes_breaks or all(map(is_special, heads)) else ""
    gap, rules = f" ({head})?" if head else "", ""
    if takes_breaks:
        gap = f" (BREAKS? {head})? BREAKS?" if head else " BREAKS?"
        head, rules = head and f"{head} BREAKS?", rule("BREAKS", r"/\n{1,2}/")
    if position is ThoughtPosition.CLOSED and head:
        return Prelude(rule("prelude", head) + rules, is_optional=True)
    if position.is_after:
        return None
    ends = spell(marks.end)
    if is_special(ends[0]):  # a thought must not contain the mark as text either: the router would end it there
        closed = f"THOUGHT {' '.join(ends)}"
        rules += rule("MARKED", f"ANY {literal(marks.end)} ANY") + rule("THOUGHT", "ANY & ~MARKED")
    else:
        closed = " ".join(["closing", *ends[1:]])
        rules += rule("closing[lazy]", f"ANY {ends[0]}")
    rules += rule("ANY", "/(?s:.*)/")
    if position.is_inside:
        return Prelude(rule("prelude", f"{closed}{gap}") + rules)
    begun = f"{' '.join(spell(marks.start))} {closed}{gap}"
    if head and marks.head_alone:
        begun += f" | {head}"
    return Prelude(rule("prelude", begun) + rules, is_optional=True, barred=marks.start)


def _grammars(form: str) -> list[dict[str, Any]]:
    """Return the grammars of a text in one of llguidance's formats: Lark, or a JSON list of grammars."""
    if form.lstrip().startswith("{"):
        whole: dict[str, Any] = json.loads(form)
        if grammars := whole.get("grammars"):
            if not isinstance(grammars, list) or not all(isinstance(each, dict) for each in grammars):
                raise ValueError("'grammars' must be a list of objects")
            return [dict(each) for each in grammars]
    return [{"lark_grammar": form}]


def _barring(text: str, regex: str) -> str:
    """Exclude texts that begin with white space and `text` from the grammar of a regular expression."""
    form = f"{regex.removeprefix(REGEX_START).rstrip()} & ~BARRED"
    barred = f"{BLANKS} {literal(text)} /(?s:.*)/"
    return rule("start", "FORM") + rule("FORM", form) + rule("BARRED", barred)
