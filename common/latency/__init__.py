"""Latency models of steps and KV transfers, fitted by workers and used by routers for predictions. Pure."""

from __future__ import annotations

from common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
