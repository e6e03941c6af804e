"""The forms in which models write calls of functions: one file each, and what they share."""

from router.text.calls.dialect import Dialect, dialect_of
from router.text.calls.form import Wanted
from router.text.calls.function import Function
from router.text.calls.harmony_scanner import ChannelTokens
from router.text.calls.scanner import CallScanner

__all__ = [
    "CallScanner",
    "ChannelTokens",
    "Dialect",
    "Function",
    "Wanted",
    "dialect_of",
]
