"""Every error that Diptych raises on purpose.

DiptychError
├── ConfigError          a setting is unknown, of the wrong type or out of range: the process refuses to start
├── ModelError           a model is missing, damaged, unsupported, of the wrong dtype or too large: refuses to start
├── WireError            a frame is not one of our messages, or exceeds a bound: counted and dropped
├── BlockError           a block was used against its ownership: a bug, never user input
├── RankLost             a rank of a tensor parallel worker is gone or out of step: the worker ends
└── RequestError         a request cannot be served; carries the HTTP status and the OpenAI error type
    ├── InvalidRequest       400  the request itself is wrong: never retried
    │   ├── ContextLengthExceeded
    │   └── FatalRequest          every worker that took it died: a 5xx would have clients send it again
    ├── ModelNotFound        404
    ├── Overloaded           429  Retry-After is set
    ├── Unavailable          503  no worker, draining, or a queue bound was hit; Retry-After is set
    ├── DeadlineExceeded     504  one of our own deadlines passed; names the phase
    └── InternalError        500
"""

from __future__ import annotations

RETRY_AFTER_S = 1.0
"""The hint of a refusal for lack of room that cannot tell when there will be some: soon, and not at once."""
MAX_RETRY_AFTER_S = 60.0
"""The longest hint: no prediction of a queue holds for longer."""
MAX_SHOWN_CHARS = 80
"""Of what a client sent, that an error repeats."""


class DiptychError(Exception):
    """Base of everything raised on purpose."""


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


class UsageError(ConfigError):
    """An unknown or incomplete option, variable or key. `message` is the whole sentence."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, "", message)
        self.args, self.is_located = (message,), True

    def located(self, place: str) -> ConfigError:
        return self


class ModelError(DiptychError):
    """A model cannot be loaded. The message says what to do about it."""


class WireError(DiptychError):
    """A frame is not one of our messages, or exceeds a bound."""


class BlockError(DiptychError):
    """A KV block was used against its ownership."""


class RankLost(DiptychError):
    """A rank of this worker died, froze, or computed something else: no further step can run."""


class RequestError(DiptychError):
    """A request that cannot be served.

    `status` is the HTTP status, `type` and `code` are OpenAI's, `param` the offending field, `retry_after_s` the hint
    sent in `Retry-After`.
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
    """A prompt, with the `max_tokens` of its answer, has more tokens than the model takes.

    The text is OpenAI's to the letter, numbers without separators: litellm and others recognise the error by it.
    `where` is the field that holds the prompt. With `at_least` only a part of the prompt was counted.
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
        """Whether the prompt leaves no room for an answer of any length."""
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
    """A client's word as an error repeats it, in quotes: at most so many characters."""
    return repr(text if len(text) <= most else text[:most] + "…")


def shown(value: object, most: int = MAX_SHOWN_CHARS) -> str:
    """Format a file's value for an error message, with up to `most` characters."""
    written = repr(value[:most] if isinstance(value, str | list | tuple) else value)
    return written if len(written) <= most else written[:most] + "…"
