"""Record of a generation request, created at its end for metrics, logs, audit log and traces.

began ─ first_at ─ ... ─ last_at ─ ended        seconds of perf_counter
        └── of each choice ────┘
"""

from __future__ import annotations

import msgspec

from common.config import DEFAULT
from common.errors import RequestError
from router.dispatch import RequestTimeline


class ChoiceRecord(msgspec.Struct, frozen=True):
    """One choice of the answer. Times are 0 without tokens. `finish_reason` is "" if it was interrupted.

    It has no grammars and stop strings, because some records are kept. `pools`: the answer is a vector.
    """

    index: int
    num_tokens: int = 0
    finish_reason: str = ""
    first_at: float = 0.0
    last_at: float = 0.0
    timeline: RequestTimeline | None = None
    max_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    pools: bool = False


class RequestRecord(msgspec.Struct, frozen=True):
    """Record of a request. `key` is the API key's name and `id` the answer's; both may be "".

    A rejected request may have no choices.
    """

    request_id: str
    path: str
    began: float
    ended: float
    status: int
    key: str = ""
    id: str = ""
    model: str = ""
    error: RequestError | None = None
    client_left: bool = False
    num_prompt_tokens: int = 0
    request_class: str = DEFAULT
    num_cached_tokens: int = 0
    choices: tuple[ChoiceRecord, ...] = ()

    @property
    def num_output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def is_answered(self) -> bool:
        """Whether a prompt was computed and produced a token or a vector."""
        return bool(self.num_output_tokens) or any(one.pools and one.finish_reason for one in self.choices)

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token of any choice, or None without tokens."""
        first_at = min((choice.first_at for choice in self.choices if choice.first_at), default=None)
        return None if first_at is None else first_at - self.began

    @property
    def finish_reason(self) -> str:
        """Finish reason of the first choice."""
        return self.choices[0].finish_reason if self.choices else ""

    @property
    def error_name(self) -> str:
        return "" if self.error is None else type(self.error).__name__
