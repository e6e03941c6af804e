"""OpenAI's completions and chat completions."""

from router.api.openai.answers import DeletedResponse, ErrorBody, InputItems, ResponseBody
from router.api.openai.batch_answers import BatchBody, BatchListBody, DeletedFile, FileBody, FileListBody
from router.api.openai.chat import conversation_tokens
from router.api.openai.choice_shape import merged
from router.api.openai.translated import chat_of, plan_translated

__all__ = [
    "BatchBody",
    "BatchListBody",
    "DeletedFile",
    "DeletedResponse",
    "ErrorBody",
    "FileBody",
    "FileListBody",
    "InputItems",
    "ResponseBody",
    "chat_of",
    "conversation_tokens",
    "merged",
    "plan_translated",
]
