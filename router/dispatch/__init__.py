"""The router's core: every event of a request or worker becomes actions, and tokens of two workers one stream.

dispatcher (asyncio) -> core (synchronous, also in virtual time) -> turns -> router.admission (who waits)
    │                     └────> router.placement -> router.policy, router.fleet (all pure)
    └─────> fleet -> connection (ZeroMQ), registry -> worker
              └────> discovery: which addresses exist
"""
