"""Finds calls whose arguments are plain text between tags, and gives them out as JSON while they arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.text.answer.marks import overlap
from router.text.answer.part import CallPart, Part
from router.text.calls.function import Function
from router.text.calls.pattern import Found, Missing
from router.text.calls.scanner import Layout, MarkedScanner
from router.text.calls.tagged_value import TEXT_ONLY, as_json, kinds_of, written

MAX_KEY_CHARS = 256
"""Of an argument's name: a longer one is text, not a call."""


@dataclass(frozen=True, slots=True)
class ArgumentTags:
    """What stands around an argument: `open` KEY `key_end`, white space, `value` VALUE `close`.

    `lined`: a line break behind the last opening tag and one before the closing one do not belong to the value.
    """

    open: str
    key_end: str
    value: str
    close: str
    lined: bool = False


class TaggedScanner(MarkedScanner):
    """A text arrives in the call as it is made; an argument of another type once it is complete."""

    def __init__(
        self,
        openings: Sequence[str],
        layouts: Sequence[Layout],
        tags: ArgumentTags,
        functions: Mapping[str, Function],
        *,
        start: int = 0,
        only_calls: bool = False,
    ) -> None:
        self._tags, self._functions = tags, functions
        self._function: Function | None = None
        self._keys: set[str] = set()
        self._kinds: frozenset[str] | None = None
        self._is_again = self._is_begun = False
        """Of the argument that is being read: whether it is there already, and whether its text has begun."""
        super().__init__(openings, layouts, start=start, only_calls=only_calls)

    @property
    def calls_are_whole(self) -> bool:
        return self._step not in (self._arguments, self._value)

    def _call(self, found: Found, parts: list[Part]) -> bool:
        self._function, self._keys = self._functions.get(found.name), set()
        return super()._call(found, parts)

    def _arguments(self, parts: list[Part]) -> bool:
        """Between arguments: another one, or the end of the call."""
        tags, held = self._tags, self._held.lstrip()
        if held.startswith(tags.open):
            return self._key(held, parts)
        if tags.open.startswith(held) or self._layout.tail.read(self._held) is Missing.MORE:
            return False
        self._give("}" if self._keys else "{}", parts)
        return self._move_to(self._tail)

    def _key(self, held: str, parts: list[Part]) -> bool:
        """From the tag that opens an argument to its value."""
        tags = self._tags
        key, end, rest = held[len(tags.open) :].partition(tags.key_end)
        rest = rest.lstrip() if tags.value else rest
        if not end or not rest.startswith(tags.value):
            may_come = tags.value.startswith(rest) if end else len(key) <= MAX_KEY_CHARS
            if may_come:
                return False
            self._give("}" if self._keys else "{}", parts)
            return self._move_to(self._gap)
        self._is_again, self._is_begun = key in self._keys, False
        self._keys.add(key)
        self._kinds = self._kinds_of(key)
        if not self._is_again:
            self._give(f"{'{' if len(self._keys) == 1 else ', '}{written(key)}: ", parts)
        self._held = rest[len(tags.value) :]
        return self._move_to(self._value)

    def _value(self, parts: list[Part]) -> bool:
        tags = self._tags
        if self._kinds == TEXT_ONLY and not self._is_begun:
            if tags.lined and not self._held:
                return False
            self._held = self._held.removeprefix("\n") if tags.lined else self._held
            self._is_begun = True
            self._give('"', parts)
        place = self._held.find(tags.close)
        if place < 0:
            return self._more_text(parts)
        text = self._held[:place].removesuffix("\n") if tags.lined else self._held[:place]
        if self._is_begun:
            self._give(written(text)[1:], parts)
        else:
            self._give(as_json(text.removeprefix("\n") if tags.lined else text, self._kinds), parts)
        return self._move_to(self._arguments, place + len(tags.close))

    def _more_text(self, parts: list[Part]) -> bool:
        """Give out what surely belongs to the text. False, as its end has not come."""
        if self._is_begun:
            tags = self._tags
            ends = (tags.close, f"\n{tags.close}") if tags.lined else (tags.close,)
            length = len(self._held) - max(overlap(self._held, end) for end in ends)
            self._give(written(self._held[:length])[1:-1], parts)
            self._held = self._held[length:]
        return False

    def _give(self, arguments: str, parts: list[Part]) -> None:
        """More of the call's arguments, but of one that is there already."""
        if arguments and not (self._is_again and self._step == self._value):
            parts.append(CallPart(self.num_calls - 1, arguments=arguments))

    def _kinds_of(self, key: str) -> frozenset[str] | None:
        if self._function is None:
            return None
        schema = self._function.arguments
        members = schema.get("properties")
        return kinds_of(members.get(key), schema) if isinstance(members, Mapping) else None
