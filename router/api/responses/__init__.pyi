from router.api.responses.fields import ResponsesRequest
from router.api.responses.kept import KeptResponses
from router.api.responses.routes import response_routes

__all__ = [
    "KeptResponses",
    "ResponsesRequest",
    "response_routes",
]
