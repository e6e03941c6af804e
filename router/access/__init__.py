"""Access control: API keys, rate limits, request classes, TLS, web page checks and the audit log."""

from __future__ import annotations

from common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
