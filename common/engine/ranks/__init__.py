"""Tensor parallel workers: several rank processes on one host, their messages and their steps."""

from __future__ import annotations

from common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
