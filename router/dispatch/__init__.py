"""The router's core: it chooses the workers of a request, and joins what they send into one token stream.

dispatcher -> core -> turns -> waiting, holding, take_back (pure)
    │           └────> placement -> router.policy (pure), prefix_index (pure)
    └─────> fleet -> connection (ZeroMQ), registry (pure) -> worker
              └────> discovery: which addresses exist
"""
