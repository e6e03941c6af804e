"""The router's core: every event of a request or worker becomes actions, and tokens of two workers one stream.

dispatcher (asyncio) -> core (synchronous, also in virtual time) -> turns -> router.dispatch (who waits)
    │                     └────> router.dispatch -> router.policy, router.fleet (all pure)
    └─────> fleet -> connection (ZeroMQ), registry -> worker
              └────> discovery: which addresses exist
"""

from router.dispatch.adapter_orders import AdapterOrders, Superseded
from router.dispatch.client import (
    ANYONE,
    Caller,
    GenerationClient,
    GenerationRequest,
    RequestTimeline,
    TokenEvent,
    TokenSource,
)
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.load import ClassLoad, DispatchLoad
from router.dispatch.prompt import Prompt

__all__ = [
    "ANYONE",
    "AdapterOrders",
    "Caller",
    "ClassLoad",
    "DispatchLoad",
    "Dispatcher",
    "GenerationClient",
    "GenerationRequest",
    "Prompt",
    "RequestTimeline",
    "Superseded",
    "TokenEvent",
    "TokenSource",
]
