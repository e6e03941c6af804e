"""A bound on the log-probabilities of prompts that unfinished answers hold in this process, about 100 bytes each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import RETRY_AFTER_S, Unavailable

MAX_PROMPT_LOGPROBS = 500_000
"""The most log-probabilities of prompts that one answer may have, alternatives included."""
MAX_HELD = 2_000_000
"""The most that all unfinished answers hold together."""


class LogprobBudget:
    """Owned by the event loop."""

    def __init__(self, most: int = MAX_HELD) -> None:
        self._most, self._held = most, 0

    @contextmanager
    def lease(self, num_logprobs: int) -> Iterator[None]:
        """Hold room for the log-probabilities of an answer's prompts while it is made. Raises Unavailable."""
        if num_logprobs and self._held + num_logprobs > self._most:
            raise Unavailable(
                f"{self._held:,} log-probabilities of prompts are under way, {num_logprobs:,} more would exceed the "
                f"{self._most:,} that this router holds",
                retry_after_s=RETRY_AFTER_S,
            )
        self._held += num_logprobs
        try:
            yield
        finally:
            self._held -= num_logprobs
