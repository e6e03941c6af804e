"""MTP layers, EAGLE and EAGLE-3 heads, which draft tokens from the hidden states of a model."""

from __future__ import annotations

from common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
