"""One HTTP request as the door sees it: whose it is, what it used, how it ended. Also its line in the audit log."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

from router.auth.keys import ANONYMOUS, ApiKey, Limits
from router.auth.limits import Quota

MAX_SHOWN_CHARS = 200


@dataclass(slots=True)
class Visit:
    """Made when the request's head is here; `began` is perf_counter seconds, `client` an address and port.

    `admitted` is set while the request counts among the active ones of its key. `status` is what the client was told,
    or in the end was not: 499 for one that went away, 5xx for a stream that broke.
    """

    request_id: str
    method: str
    path: str
    client: str
    key: ApiKey = ANONYMOUS
    quota: Quota = field(default_factory=lambda: Quota(Limits(), 0.0))
    began: float = field(default_factory=time.perf_counter)
    admitted: bool = False
    model: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    status: int = 0
    finish_reason: str = ""
    error: str = ""

    def audit_entry(self) -> dict[str, object]:
        """Names and numbers only."""
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "key": self.key.name or None,
            "request_id": self.request_id,
            "client": self.client,
            "method": self.method[:MAX_SHOWN_CHARS],
            "path": self.path[:MAX_SHOWN_CHARS],
            "model": self.model or None,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "status": self.status,
            "finish_reason": self.finish_reason or None,
            "error": self.error or None,
            "duration_ms": round((time.perf_counter() - self.began) * 1e3, 3),
        }
