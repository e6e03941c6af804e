"""Draft heads: MTP layers, EAGLE and EAGLE-3 heads, which draft tokens from a model's hidden states."""

from __future__ import annotations

from common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
