from router.dispatch.adapter_orders import Superseded
from router.dispatch.client import (
    ANYONE,
    Caller,
    GenerationClient,
    GenerationRequest,
    Prediction,
    RequestTimeline,
    TokenEvent,
    TokenSource,
)
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.load import ClassLoad, DispatchLoad
from router.dispatch.prompt import Prompt
from router.dispatch.trail import Step, Trail

__all__ = [
    "ANYONE",
    "Caller",
    "ClassLoad",
    "DispatchLoad",
    "Dispatcher",
    "GenerationClient",
    "GenerationRequest",
    "Prediction",
    "Prompt",
    "RequestTimeline",
    "Step",
    "Superseded",
    "TokenEvent",
    "TokenSource",
    "Trail",
]
