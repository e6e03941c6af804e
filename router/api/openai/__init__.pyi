from router.api.openai.answers import DeletedResponse, ErrorBody, InputItems, ResponseBody
from router.api.openai.chat import chat_routes, merged
from router.api.openai.completions import completion_routes

__all__ = [
    "DeletedResponse",
    "ErrorBody",
    "InputItems",
    "ResponseBody",
    "chat_routes",
    "completion_routes",
    "merged",
]
