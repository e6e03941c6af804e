"""The router's core: which workers serve a request, and one token stream out of whatever they send.

dispatcher -> placement -> policy (pure), prefix_index (pure)
    └─────> fleet -> connection (ZeroMQ), registry (pure) -> worker
              └────> discovery: which addresses there are
"""
