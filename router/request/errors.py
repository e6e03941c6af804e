"""Error responses, in OpenAI's format or, for requests of Anthropic's or Ollama's API, in theirs.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

The classes extend the tree of `common.errors` with HTTP errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.errors import (
    MAX_SHOWN_CHARS,
    RETRY_AFTER_S,
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    RequestError,
)
from router.request.paths import MESSAGES_PATH, MODELS_PATH, OLLAMA

ANTHROPIC_HEADER = "anthropic-version"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
NOT_HERE = "not_supported"
"""Type of the pydantic error for a value that `extensions.Only` rejects."""
CLIENT_CLOSED = 499
"""nginx's status for a client that disconnected. Used only in logs and metrics."""


class UnknownPath(RequestError):
    status = 404
    type = "invalid_request_error"
    code = "unknown_url"


class RequestNotFound(RequestError):
    status = 404
    type = "invalid_request_error"
    code = "request_not_found"


class MethodNotAllowed(RequestError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class BodyTimeout(RequestError):
    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class BodyTooLarge(RequestError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class UnsupportedMediaType(RequestError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class HeadTimeout(RequestError):
    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class HeadTooLarge(RequestError):
    status = 431
    type = "invalid_request_error"
    code = "request_header_fields_too_large"


class InvalidField(InvalidRequest):
    """A field has an invalid value. `problem` omits the value, which may be part of a prompt."""

    def __init__(self, problem: str, shown: str, *, param: str | None) -> None:
        super().__init__(problem + shown, param=param)
        self.problem = problem


class Unsupported(InvalidRequest):
    """The field exists in other servers of this API but not here. Ignoring it would change the answer."""

    code = "unsupported"


class ThreadUnsupported(Unsupported):
    """This server does not store threads. Anthropic's clients then send the whole conversation."""

    code = "thread_unsupported_request"


def unsupported(param: str, what: str) -> Unsupported:
    return Unsupported(f"{param}: {what} is not supported by this server", param=param)


def error_object(error: RequestError) -> dict[str, object]:
    """Return the body of an error response, or the payload of an error event, in OpenAI's format."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def anthropic_error(error: RequestError) -> dict[str, object]:
    """Return the error in Anthropic's format, where the type depends on the status. Clients act on `details`."""
    kind = ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    body: dict[str, object] = {"type": kind, "message": error.message}
    match error:
        case ContextLengthExceeded():
            body["message"] = _anthropic_overflow(error)
        case ThreadUnsupported():
            body["details"] = {"error_code": error.code}
    return {"type": "error", "error": body}


def _anthropic_overflow(error: ContextLengthExceeded) -> str:
    """Return Anthropic's message for an exceeded context. Its clients parse the message and its numbers."""
    num_tokens, most = error.num_prompt_tokens, error.max_model_len
    if error.prompt_alone:
        return f"prompt is too long: {num_tokens} tokens > {most - 1} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {num_tokens} + {error.max_tokens} > {most}, "
        "decrease input length or `max_tokens` and try again"
    )


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a request uses Anthropic's API, by its path or, for paths of both APIs, by its header."""
    path = scope.get("path", "")
    if path == MODELS_PATH or path.startswith(f"{MODELS_PATH}/"):
        return ANTHROPIC_HEADER in Headers(scope=scope)
    return bool(path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/"))


def ollama_error(error: RequestError) -> dict[str, object]:
    """Return the error in Ollama's format."""
    return {"error": error.message}


def speaks_ollama(scope: Scope) -> bool:
    """Whether a request uses Ollama's API."""
    return bool(scope.get("path", "").startswith(OLLAMA))


class ErrorResponse(Response):
    """An error response whose format is selected when it is sent, by the request's API."""

    media_type = "application/json"

    def __init__(self, error: RequestError, headers: Mapping[str, str]) -> None:
        super().__init__(orjson.dumps(error_object(error)), error.status, headers=headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        write = anthropic_error if speaks_anthropic(scope) else ollama_error if speaks_ollama(scope) else None
        if write is not None:
            self.body = orjson.dumps(write(self._error))
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """Create the response to a request that failed before its answer began."""
    all_headers = dict(headers or {})
    if error.status in (429, 503):
        seconds = RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
        all_headers["retry-after"] = str(max(1, math.ceil(seconds)))
    if error.status == 401:
        all_headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413):  # the rest of the body is unread, so the connection cannot be reused
        all_headers["connection"] = "close"
    return ErrorResponse(error, all_headers)


def loggable(error: RequestError) -> str:
    """Return the message for logs, without field values, which clients control."""
    match error:
        case InvalidField():
            return error.problem
        case ModelNotFound():
            return "the requested model does not exist"
        case Unsupported():
            return f"{error.param}: not supported by this server"
    return error.message


def as_request_error(error: Exception) -> RequestError:
    """Return the error, or an InternalError without details if it is unexpected."""
    return error if isinstance(error, RequestError) else InternalError("The server failed to handle this request.")


def invalid_field(error: ValidationError, body: object) -> InvalidRequest:
    """Convert pydantic's most specific error for `body`. `param` is the path of the field."""
    found: dict[tuple[str | int, ...], list[str]] = {}
    kinds: dict[tuple[str | int, ...], set[str]] = {}
    values: dict[tuple[str | int, ...], object] = {}
    for problem in error.errors(include_url=False):
        path, value = _resolve(problem["type"], problem["loc"], body)
        found.setdefault(path, []).append(_text(problem["type"], problem["msg"], problem.get("ctx", {})))
        kinds.setdefault(path, set()).add(problem["type"])
        values[path] = value
    path = max(found, key=len)
    param = param_of(path)
    if NOT_HERE in kinds[path]:
        return Unsupported(f"{param}: {found[path][0]}", param=param)
    what = ", or ".join(dict.fromkeys(found[path]))
    if not path:
        return InvalidRequest(f"The body: {what}")
    return InvalidField(f"{param}: {what}", _got(values[path], what), param=param)


def invalid_translation(error: ValidationError) -> InvalidRequest:
    """Convert the first error of a request that was translated from another API with wider limits."""
    problem = error.errors(include_url=False)[0]
    param = param_of(problem["loc"])
    return InvalidRequest(f"{param}: {_text(problem['type'], problem['msg'], problem.get('ctx', {}))}", param=param)


def param_of(path: Sequence[str | int]) -> str | None:
    """Format a path: ("messages", 0, "role") becomes "messages[0].role"."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or None


def _resolve(kind: str, location: Sequence[str | int], body: Any) -> tuple[tuple[str | int, ...], object]:
    """Return the path in `body` for pydantic's location, which also names union members, and the value there."""
    path: tuple[str | int, ...] = ()
    for part in location:
        inside_list = isinstance(body, list) and isinstance(part, int) and part < len(body)
        if inside_list or (isinstance(body, dict) and part in body):
            body = body[part]
            path = (*path, part)
    return ((*path, location[-1]), None) if kind == "missing" else (path, body)


MESSAGES = {
    "missing": "is required",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "too_long": "must have at most {max_length} entries, not {actual_length}",
    "too_short": "must not be empty",  # every minimum is 1
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
}


def _text(kind: str, message: str, context: Mapping[str, object]) -> str:
    """Return the message for a problem, rephrased if pydantic's mentions Python."""
    if kind in MESSAGES:
        return MESSAGES[kind].format(**context)
    message = message.removeprefix("Value error, ")
    return f"must {message[6:].removeprefix('should ')}" if message.startswith("Input should ") else message


def _got(value: object, what: str) -> str:
    if what == "is required" or isinstance(value, dict | list):
        return ""
    shown = repr(value[: MAX_SHOWN_CHARS + 1] if isinstance(value, str) else value)
    return f" (got {shown if len(shown) <= MAX_SHOWN_CHARS else shown[:MAX_SHOWN_CHARS] + '…'})"
