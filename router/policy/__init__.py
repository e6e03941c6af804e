"""Routing decisions. Pure: workers, requests and `now` in, a decision out. `router.dispatch` executes them.

policy             interface of a routing policy
plugins            routing policies by name, or from a module
plain              round robin, least loaded and others
routing            the built-in routing policy
decision           description of a decision for `diptych explain`
shortlist          candidate selection in large pools
forecast           predicted times of a request on a worker, now and when its KV arrives
output_lengths     predicted length of answers
wait_limit         maximum wait of a request
token_counters     fair sharing between keys and classes
balance            live migration of answers
roles              role changes of workers
"""

from __future__ import annotations

from common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
