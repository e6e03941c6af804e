"""State of a request on a decode worker."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from common.blocks import Window
from common.engine.sequences import WorkerSequence
from common.engine.transfer import SenderMemory
from common.wire import SampledToken, TokenLogprobs
from common.wire.messages import DecodeRequest, KVOpen
from decode_worker.drafting.draft_tokens import DraftStats, PromptLookup

if TYPE_CHECKING:  # loads torch, which simulations do not need
    from common.engine.sampling import TokenCounts

PRIORITY_LEVEL_S = 2.0
"""Seconds of waiting that one level of priority is worth. Every sequence eventually gets its turn."""


class RequestStatus(Enum):
    """State of a request.

    EXPECTING ──KVOpen──> OPENED ──KVGrant──> TRANSFERRING ──KVDone, all received──> RUNNING ──> (gone)
    WAITING (local prefill) ──blocks──> RUNNING <──blocks── PREEMPTED <──out of blocks── RUNNING
    RUNNING ──hand-over: its last blocks are sent──> LEAVING ──KVAck──> (gone), or ──failed──> RUNNING
    """

    EXPECTING = "expecting"
    OPENED = "opened"
    TRANSFERRING = "transferring"
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    LEAVING = "leaving"


@dataclass(slots=True, eq=False)
class DecodeSequence(WorkerSequence):
    """A request from reservation to its last token.

    Steps in flight are sampling `num_pending` more tokens. Their KV counts as computed, because only later steps read
    it. Such a step may yield `num_drafted` more tokens. A step in flight that `deferred` the sequence samples nothing
    for it; its last token is computed again. Rows from `plain_from` tokens on are sampled from parameters and position
    only (infinity: never).

    Announced KV starts with block `first_block`; earlier blocks are outside of the model's window. Younger requests
    that were admitted while it waits for blocks own `num_passing_blocks`.

    With prompt log probabilities, the router has those of the tokens at positions 1 to `num_logprobs_sent`. Output
    token i (from `num_prompt_tokens` on) is reported to the router once; `num_reported` counts those of the current
    attempt.
    """

    request: DecodeRequest
    status: RequestStatus = field(kw_only=True)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_pending: int = 0
    num_drafted: int = 0
    deferred: bool = False
    num_logprobs_sent: int = 0
    num_received_blocks: int = 0
    first_block: int = 0
    num_reported: int = field(init=False)
    plain_from: float = field(init=False)
    num_preemptions: int = 0
    num_passing_blocks: int = 0
    first_token_at: float = 0.0
    peer: bytes = b""
    memory: SenderMemory | None = None
    quantised: bool = False
    opened_at: float = 0.0
    renewed_at: float = 0.0
    granted_at: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    exposed_transfer_s: float = 0.0
    transfer_bytes: int = 0
    clock_offset_s: float = 0.0
    counts: TokenCounts | None = None
    lookup: PromptLookup | None = None
    draft_stats: DraftStats = field(default_factory=DraftStats)

    def __post_init__(self) -> None:
        WorkerSequence.__post_init__(self)  # `super()` fails in a dataclass with slots
        self.num_reported = self.request.num_output_tokens
        params = self.params
        self.plain_from = self.num_prompt_tokens + params.min_tokens if params.is_plain else math.inf

    @property
    def rank(self) -> float:
        """Sort key in the queue for blocks, lowest first: arrival time, minus a bonus for priority."""
        return self.accepted_at - PRIORITY_LEVEL_S * self.priority

    @property
    def num_announced_tokens(self) -> int:
        """Tokens whose KV may arrive. In a hand-over, includes those that the other worker samples until then."""
        return self.num_request_tokens + self.request.num_reserved_tokens

    @property
    def num_room_tokens(self) -> int:
        """Tokens that need blocks at admission."""
        return self.num_announced_tokens if self.status is RequestStatus.OPENED else len(self.token_ids)

    @property
    def num_planned(self) -> int:
        """Number of tokens after the steps in flight, without accepted draft tokens."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_at_most(self) -> int:
        """Number of tokens after the steps in flight, if all draft tokens are accepted."""
        return self.num_planned + self.num_drafted

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is not computed: 1 for a decoding sequence."""
        return self.num_planned - self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        return (
            self.params.prompt_logprobs >= 0
            and not self.request.num_output_tokens
            and self.num_logprobs_sent + 1 < self.num_request_tokens
        )

    @property
    def skips_step(self) -> bool:
        """Whether the next step must not sample it, because the mask of its next token is not computed yet."""
        if self.awaits_mask or self.deferred:
            return True
        return self.num_pending > 0 and self.constraint is not None and self.constraint.is_slow

    @property
    def num_cacheable(self) -> int:
        if self.wants_prompt_logprobs:
            return self.num_logprobs_sent
        return self.num_tokens - (self.status is not RequestStatus.OPENED)

    @property
    def runs(self) -> bool:
        """Whether it is in the running batch."""
        return self.status is RequestStatus.RUNNING

    @property
    def waits_to_run(self) -> bool:
        """Whether it waits for its KV, or for blocks to compute it here for the first time."""
        return self.is_incoming or self.status is RequestStatus.WAITING

    @property
    def is_incoming(self) -> bool:
        """Whether it waits for KV from another worker."""
        return self.status in (RequestStatus.EXPECTING, RequestStatus.OPENED, RequestStatus.TRANSFERRING)

    @property
    def is_growing(self) -> bool:
        """Whether it arrives in a hand-over, so that its sender decodes further tokens in the meantime."""
        return self.request.num_reserved_tokens > 0

    @property
    def awaits_turn(self) -> bool:
        """Whether steps must compute KV before its next token, for its prompt or after a preemption."""
        return not self.is_incoming and (self.num_remaining > 1 or not self.has_first_token)

    @property
    def has_first_token(self) -> bool:
        """Whether this attempt has output, from this worker or the prefill worker."""
        return self.num_tokens > self.num_request_tokens

    def is_continued_by(self, request: DecodeRequest) -> bool:
        """Whether `request` is another attempt at this one. False with prompt logprobs, which would be lost."""
        mine = self.request
        if mine.params.prompt_logprobs >= 0:
            return False
        of_mine = (mine.prompt, mine.params, mine.num_output_tokens, mine.cache_salt, mine.num_reserved_tokens)
        return (*of_mine, mine.adapter) == (
            request.prompt,
            request.params,
            request.num_output_tokens,
            request.cache_salt,
            request.num_reserved_tokens,
            request.adapter,
        )

    def mismatch(self, announced: KVOpen, window: Window) -> str:
        """Return why the announced KV does not match this request, or ""."""
        if announced.worker_id != self.request.prefill_worker:
            return f"expected KV from {self.request.prefill_worker}, not from {announced.worker_id}"
        if announced.num_blocks != -(-self.num_announced_tokens // window.block_size):
            return f"{announced.num_blocks} blocks do not match the length of the prompt"
        needed = window.first_block(self.num_request_tokens)
        if announced.first_block > (announced.num_blocks if self.request.num_reserved_tokens else needed):
            return f"announced blocks from {announced.first_block} on, but the window begins in block {needed}"
        return ""

    def append(self, sampled: SampledToken) -> None:
        self.token_ids.append(sampled.token_id)
        if sampled.logprobs is not None:
            self.logprobs.append(sampled.logprobs)

    def restart_reporting(self, request: DecodeRequest) -> None:
        """Continue under a new attempt, for which the router needs all tokens again."""
        self.request = request
        self.num_reported = request.num_output_tokens
