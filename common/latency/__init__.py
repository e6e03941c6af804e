"""How long steps and KV transfers take: models that workers fit to their own, and that routers predict with. Pure."""

from __future__ import annotations

from common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
