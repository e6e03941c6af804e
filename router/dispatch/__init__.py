"""Request dispatch: turns events of requests and workers into actions, and merges tokens of two workers into a stream.

dispatcher (asyncio) -> core (synchronous, also in virtual time) -> request_scheduler (which request is placed next)
    │                     └────> router.policy, router.fleet (all pure)
    └─────> fleet -> connection (ZeroMQ), registry -> worker
              └────> discovery: which addresses exist
"""

from __future__ import annotations

from common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
