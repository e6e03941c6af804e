"""The registered formats by the ids of their tests: the name, and the variant if there is one."""

from __future__ import annotations

from router.text.calls import FORMATS as REGISTERED
from router.text.calls.format import CallFormat
from router.text.calls.gemma import GemmaFormat
from router.text.calls.pythonic import PythonicFormat
from router.text.calls.tagged import TaggedFormat


def _id(call_format: CallFormat) -> str:
    variants = [flag for flag, is_set in vars(call_format).items() if is_set is True]
    return ", ".join([call_format.name, *variants])


FORMATS: dict[str, CallFormat] = {_id(each): each for each in REGISTERED}
WITHOUT_CHANNELS = {name: each for name, each in FORMATS.items() if not each.has_channels}
TAGGED = tuple(name for name, each in FORMATS.items() if isinstance(each, TaggedFormat))
UNTYPED = tuple(name for name, each in FORMATS.items() if isinstance(each, TaggedFormat) and not each.tags.typed)
"""Tagged formats in which every text is a string."""
OWN_SYNTAX = tuple(
    name for name, each in FORMATS.items() if isinstance(each, PythonicFormat | TaggedFormat | GemmaFormat)
)
"""Formats whose arguments are not JSON."""
AT_ONCE = tuple(name for name in OWN_SYNTAX if name not in TAGGED)
"""Formats whose scanner returns a call only once it is complete."""
