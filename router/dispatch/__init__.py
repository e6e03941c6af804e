"""The router's core: every event of a request or worker becomes actions, and tokens of two workers one stream.

dispatcher (asyncio) -> core (synchronous, also in virtual time) -> turns -> router.dispatch (who waits)
    │                     └────> router.dispatch -> router.policy, router.fleet (all pure)
    └─────> fleet -> connection (ZeroMQ), registry -> worker
              └────> discovery: which addresses exist
"""

from __future__ import annotations

from common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
