"""One HTTP request as the door sees it: whose it is and how it ended. Also its line in the audit log."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

from router.access.keys import ANONYMOUS, ApiKey, Limits
from router.access.limits import ModelQuota, Quota
from router.observe import RequestRecord

MAX_SHOWN_CHARS = 200
"""Of a method or a path in the log."""


@dataclass(slots=True)
class Visit:
    """Made when the request's head is here; `began` is perf_counter seconds, `client` an address and port.

    `admitted` is set while the request counts among the active ones of its key, and it counts against `model_quotas`
    while a model answers it. `status` is what the client was told, or in the end was not: 499 for one that went away,
    5xx for a stream that broke. `record` is there once a generation request has ended.
    """

    request_id: str
    method: str
    path: str
    client: str
    key: ApiKey = ANONYMOUS
    quota: Quota = field(default_factory=lambda: Quota(Limits(), 0.0))
    began: float = field(default_factory=time.perf_counter)
    admitted: bool = False
    model_quotas: tuple[ModelQuota, ...] = ()
    status: int = 0
    error: str = ""
    record: RequestRecord | None = None
    left_out: tuple[str, ...] = ()
    """Types of declared tools that the server ignored."""

    def answered(self, record: RequestRecord) -> None:
        """A generation request has ended."""
        self.record, self.status, self.error = record, record.status, record.error_name

    def audit_entry(self) -> dict[str, object]:
        """Names and numbers only."""
        entry: dict[str, object] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "key": self.key.name or None,
            "request_id": self.request_id,
            "client": self.client,
            "method": self.method[:MAX_SHOWN_CHARS],
            "path": self.path[:MAX_SHOWN_CHARS],
            "model": None,
            "prompt_tokens": 0,
            "output_tokens": 0,
            "status": self.status,
            "finish_reason": None,
            "error": self.error or None,
            "duration_ms": round((time.perf_counter() - self.began) * 1e3, 3),
        }
        if (record := self.record) is not None:
            entry |= {"prompt_tokens": record.num_prompt_tokens, "output_tokens": record.num_output_tokens}
            entry |= {"model": record.model or None, "finish_reason": record.finish_reason or None}
        return entry
