"""Decisions of the router, pure: workers, clients and `now` in, a decision out. `router.dispatch` carries them out.

policy             interface of a routing policy
plugins            routing policies by name, or from any module
plain              round robin, least loaded and others
routing            the built-in routing policy
shortlist          out of many workers, those that are weighed
forecast           the times of a request at a place, now and when its KV arrives
output_lengths     how much a request will generate
patience           how long a request may wait
token_counters     whose turn it is
balance            which answer moves
roles              which worker changes its role
"""

from __future__ import annotations

from common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
