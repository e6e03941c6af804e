"""Exceptions of Diptych.

DiptychError
├── ConfigError          a setting is unknown, of the wrong type or out of range: the process does not start
├── ModelError           a model is missing, damaged, unsupported, of the wrong dtype or too large: does not start
├── WireError            a frame is not a valid message or exceeds a limit: counted and dropped
├── BlockError           a block was used without owning it: a bug, never caused by input
├── DeviceLost           the GPU of this worker has failed: the worker exits
├── RankLost             a rank of a tensor-parallel worker is gone or out of step: the worker exits
└── RequestError         a request cannot be served; has the HTTP status and the OpenAI error type
    ├── InvalidRequest       400  the request is invalid: not retried
    │   ├── ContextLengthExceeded
    │   └── FatalRequest          every worker that ran it died; not a 5xx, which clients would retry
    ├── ModelNotFound        404
    ├── Overloaded           429  with Retry-After
    ├── Unavailable          503  no worker, draining, or a full queue; with Retry-After
    ├── DeadlineExceeded     504  a deadline of Diptych passed; names the phase
    └── InternalError        500
"""

from __future__ import annotations

from collections.abc import Sequence

RETRY_AFTER_S = 1.0
"""Default of `Retry-After` for capacity errors without an estimate, in seconds."""
MAX_RETRY_AFTER_S = 60.0
"""Maximum of `Retry-After` in seconds. Predictions of a queue are not valid for longer."""
MAX_SHOWN_CHARS = 80
"""Maximum number of characters of client input in an error."""
MAX_DOUBLINGS = 64
"""A float overflows after 1,023. No first delay needs more to reach the longest one."""


def backoff_s(first_s: float, longest_s: float, num_doublings: int) -> float:
    """Return the delay before the next attempt, in seconds: exponential backoff up to `longest_s`."""
    return min(longest_s, first_s * 2.0 ** min(num_doublings, MAX_DOUBLINGS))


class DiptychError(Exception):
    """Base class of all exceptions of Diptych."""


class ConfigError(DiptychError):
    """An invalid setting. `allowed` describes the valid values and follows "must be" in the message."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"invalid {field}={value!r}: must be {allowed}")
        self.field, self.value, self.allowed = field, value, allowed
        self.is_located = False

    def located(self, place: str) -> ConfigError:
        """Return this error with a message that begins with `place`, such as "invalid --port 99999"."""
        error = ConfigError(self.field, self.value, self.allowed)
        error.args, error.is_located = (f"{place}: must be {self.allowed}",), True
        return error


class InUseError(ConfigError):
    """A setting names a resource that another process, or the previous role of this worker, uses."""


class UsageError(ConfigError):
    """An unknown or incomplete option, variable or key. `message` is the whole sentence."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, "", message)
        self.args, self.is_located = (message,), True

    def located(self, place: str) -> ConfigError:
        return self


class ModelError(DiptychError):
    """A model cannot be loaded. The message contains the remedy."""


class WireError(DiptychError):
    """A frame is not a valid message, or exceeds a limit."""


class BlockError(DiptychError):
    """A KV block was used without owning it."""


class DeviceLost(DiptychError):
    """The GPU of this worker has failed, so no further step can run. A new process may work."""


class RankLost(DiptychError):
    """A rank of this worker died, hung or diverged, so no further step can run."""


class RequestError(DiptychError):
    """A request that cannot be served.

    `status` is the HTTP status, `type` and `code` are OpenAI's, `param` is the offending field, `retry_after_s` is sent
    as `Retry-After`.
    """

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.retry_after_s = message, param, retry_after_s
        if code is not None:
            self.code = code


class InvalidRequest(RequestError):
    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """The prompt plus `max_tokens` exceeds the model's maximum length.

    The text is exactly OpenAI's, including numbers without separators: litellm and others match it. `where` is the
    field that contains the prompt. With `at_least`, only a part of the prompt was counted.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        num_prompt_tokens: int,
        max_model_len: int,
        max_tokens: int = 1,
        *,
        where: str = "prompt",
        at_least: bool = False,
    ) -> None:
        self.num_prompt_tokens, self.max_model_len, self.max_tokens = num_prompt_tokens, max_model_len, max_tokens
        noun, more = "messages" if where == "messages" else "prompt", "at least " if at_least else ""
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{more}{num_prompt_tokens + max_tokens} tokens ({more}{num_prompt_tokens} in the {noun}, {max_tokens} in "
            f"the completion). Please reduce the length of the {noun} or completion.",
            param=where if self.prompt_alone else "max_tokens",
        )

    @property
    def prompt_alone(self) -> bool:
        """Whether the prompt leaves no space for an answer of any length."""
        return self.num_prompt_tokens >= self.max_model_len


class FatalRequest(InvalidRequest):
    code = "request_ends_workers"


class ModelNotFound(RequestError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class Overloaded(RequestError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class Unavailable(RequestError):
    status = 503
    type = "server_error"
    code = "service_unavailable"


class DeadlineExceeded(RequestError):
    status = 504
    type = "server_error"
    code = "deadline_exceeded"


class InternalError(RequestError):
    status = 500
    type = "server_error"
    code = "internal_error"


def quoted(text: str, most: int = MAX_SHOWN_CHARS) -> str:
    """Quote client input for an error message, with up to `most` characters."""
    return repr(text if len(text) <= most else text[:most] + "…")


def shown(value: object, most: int = MAX_SHOWN_CHARS) -> str:
    """Format a file's value for an error message, with up to `most` characters."""
    written = repr(value[:most] if isinstance(value, str | list | tuple) else value)
    return written if len(written) <= most else written[:most] + "…"


def listed(names: Sequence[str], most: int) -> str:
    """Format names for a message, up to `most` of them: "a, b and 3 more"; "none" for no names."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more
