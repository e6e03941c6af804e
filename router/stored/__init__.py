"""SQLite stores for data that outlives its request: responses, files and batches. Loaded only if one is configured."""

from __future__ import annotations

from common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
