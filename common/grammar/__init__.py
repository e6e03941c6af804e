"""Constraints on the next token: grammars, compiled within limits, token limits, and finish reasons."""

from __future__ import annotations

from common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
