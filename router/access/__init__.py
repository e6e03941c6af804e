"""Who may do what: API keys, limits, request classes, TLS, web pages, the audit log."""

from __future__ import annotations

from common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
