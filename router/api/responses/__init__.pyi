from router.api.responses.fields import ResponsesRequest
from router.api.responses.routes import response_routes
from router.api.responses.service import ResponseService

__all__ = [
    "ResponseService",
    "ResponsesRequest",
    "response_routes",
]
