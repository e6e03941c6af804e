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
from router.dispatch.serving_orders import FIRST_WEIGHTS, PauseMode
from router.dispatch.trail import Step, Trail

__all__ = [
    "ANYONE",
    "Caller",
    "ClassLoad",
    "DispatchLoad",
    "FIRST_WEIGHTS",
    "PauseMode",
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
