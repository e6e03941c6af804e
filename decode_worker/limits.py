"""How long requests wait on a decode worker, and how far its steps draft."""

from __future__ import annotations

from dataclasses import dataclass

HANDOVER_TIMEOUT_S = 10.0
"""How long a hand-over to another decode worker may take before the answer goes on here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    """How long a request may wait for room, for the rest of its KV, and for the end of a hand-over, in seconds.

    A step checks at most `max_draft_tokens` tokens for each sequence.
    """

    grant_timeout_s: float
    transfer_timeout_s: float
    handover_timeout_s: float = HANDOVER_TIMEOUT_S
    max_draft_tokens: int = 0
