"""Blocks below the prefix cache: in the host memory of a GPU's worker, and in files that outlive a worker."""

from __future__ import annotations

from common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
