"""State of a request on a worker whose model vLLM computes."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from common.blocks import BlockHasher
from common.engine.vllm.client import Drafts
from common.latency import StepShape
from common.wire import SamplingParams, TokenLogprobs
from common.wire.messages import DecodeRequest, PrefillRequest, Timeline, TokenDelta

if TYPE_CHECKING:
    from common.engine.vllm.client import Answer


class Phase(Enum):
    """Phase of a request.

    prefill:  WAITING ──first token──> SENDING ──all ranks acknowledged──> (gone)
    decode:   EXPECTING ──KV has arrived──> RUNNING ──> (gone)       WAITING (local prefill) ──first token──> RUNNING
    """

    WAITING = "waiting"
    EXPECTING = "expecting"
    RUNNING = "running"
    SENDING = "sending"


@dataclass(slots=True, eq=False)
class VllmSequence:
    """A request on a worker. `token_ids`: prompt, which may end with earlier output, and output.

    `num_expected_hits` tokens were in the prefix cache when it arrived. `is_incoming`: a prefill worker's KV is used.
    `waits_for`: ranks that have not reported the
    end of its transfer. `is_lent`: its blocks may be read by a transfer. `answer`: the request in vLLM, once added,
    whose outputs `task` reads. `num_reported` output tokens were reported, including those of earlier attempts.
    `allowed`: the only tokens that the answer may contain; empty for all. Times are monotonic.
    """

    router: bytes
    request: PrefillRequest | DecodeRequest
    token_ids: list[int]
    hasher: BlockHasher
    accepted_at: float
    deadline: float
    phase: Phase
    num_request_tokens: int = field(init=False)
    num_reported: int = field(init=False)
    allowed: frozenset[int] = field(init=False)
    num_expected_hits: int = 0
    waits_for: set[int] = field(default_factory=set)
    first_block: int = 0
    is_incoming: bool = False
    is_lent: bool = False
    is_dropped: bool = False
    answer: Answer | None = None
    task: asyncio.Task[None] | None = None
    added_at: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    first_token_at: float = 0.0
    transfer_s: float = 0.0
    grant_wait_s: float = 0.0
    exposed_s: float = 0.0
    transfer_bytes: int = 0
    num_skipped: int = 0
    drafts: Drafts = Drafts()
    num_preemptions: int = 0
    transport: str = "tcp"

    def __post_init__(self) -> None:
        self.num_request_tokens = len(self.token_ids)
        self.num_reported = self.request.num_output_tokens
        self.allowed = frozenset(self.params.allowed_token_ids)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def attempt(self) -> int:
        return self.request.attempt

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the client's prompt, excluding the output of earlier attempts."""
        return self.num_request_tokens - self.request.num_output_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def has_first_token(self) -> bool:
        """Whether this attempt has output, from this worker or a prefill worker."""
        return len(self.token_ids) > self.num_request_tokens

    @property
    def remaining_shape(self) -> StepShape:
        """Prompt tokens that are not computed, without those expected in the cache."""
        return StepShape.of_prompt(min(self.num_expected_hits, self.num_request_tokens - 1), self.num_request_tokens)

    @property
    def due_at(self) -> float:
        """Time at which the first token is due; infinity without a goal."""
        return self.accepted_at + self.request.ttft_s if self.request.ttft_s else math.inf

    def conflict(self, token_id: int) -> str:
        """Return why the request's rules forbid this token as the next one, or "".

        vLLM samples any token if the rules together allow none.
        """
        if self.allowed and token_id not in self.allowed:
            return "allowed_token_ids has no token that the other rules allow next"
        return ""

    def append(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)

    def delta(self, reason: str = "", timeline: Timeline | None = None) -> TokenDelta:
        """Return the tokens that were not reported in this attempt, if any, and count them as reported."""
        new = self.token_ids[self.num_prompt_tokens + self.num_reported :]
        made_here = self.num_reported - self.request.num_output_tokens
        delta = TokenDelta(
            self.request_id,
            self.attempt,
            self.num_reported,
            tuple(new),
            reason,
            self.num_cached,
            tuple(self.logprobs[made_here : made_here + len(new)]) if self.params.logprobs >= 0 else (),
            timeline,
        )
        self.num_reported += len(new)
        return delta

    def timeline(self, now: float) -> Timeline:
        return Timeline(
            queue_s=max(0.0, self.queue_s),
            prefill_s=max(0.0, self.prefill_s),
            grant_wait_s=self.grant_wait_s,
            transfer_s=self.transfer_s,
            exposed_transfer_s=self.exposed_s,
            decode_s=max(0.0, now - self.first_token_at) if self.first_token_at else 0.0,
            transfer_bytes=self.transfer_bytes,
            num_preemptions=self.num_preemptions,
            num_drafts=self.drafts.num_drafts,
            num_draft_tokens=self.drafts.num_tokens,
            accepted_places=self.drafts.accepted,
        )
