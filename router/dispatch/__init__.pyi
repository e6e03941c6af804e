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
