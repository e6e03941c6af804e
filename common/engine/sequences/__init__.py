"""What the engines of both workers share: sequences, the order of prompts, the size of steps, reports."""

from __future__ import annotations

from common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
