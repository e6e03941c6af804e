"""What a decode engine is told once, at its start."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeEngineConfig:
    """`identity` is the worker's id and epoch. `max_model_len` is the model's; the cache may hold less.

    `max_waiting` requests may be here beyond those that run. A decode step checks at most `max_draft_tokens` tokens for
    each of them.
    """

    identity: tuple[str, int]
    eos_token_ids: Collection[int]
    max_model_len: int
    max_waiting: int
    grant_timeout_s: float
    transfer_timeout_s: float
    handover_timeout_s: float
    max_draft_tokens: int = 0
