from router.text.calls.dialect import Dialect, dialect_of
from router.text.calls.format import CallFormat, Function, Spell, Wanted
from router.text.calls.harmony import ChannelTokens
from router.text.calls.registry import FORMATS
from router.text.calls.scanner import CallScanner

__all__ = [
    "CallFormat",
    "CallScanner",
    "ChannelTokens",
    "Dialect",
    "FORMATS",
    "Function",
    "Spell",
    "Wanted",
    "dialect_of",
]
