"""A worker of several processes, on one host or several: their start and end, their messages, and their steps."""

from __future__ import annotations

from common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
