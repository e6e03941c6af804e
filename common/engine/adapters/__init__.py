"""LoRA adapters: read from disk, checked, and held in the places that a step's rows name."""

from __future__ import annotations

from common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
