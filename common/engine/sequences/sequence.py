"""A request on a worker, as prefill and decode workers keep it alike."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.blocks import BlockHasher
from common.engine.kv.tiers import BlockRead
from common.latency import StepShape
from common.wire import SamplingParams
from common.wire.messages import DecodeRequest, PrefillRequest

if TYPE_CHECKING:  # torch: schedulers also run without it, in virtual time
    from torch import Tensor

    from common.grammar import Constraint

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class WorkerSequence:
    """`token_ids` is prompt + output; the KV of the first `num_computed` of them is in `blocks`.

    The first `num_gone` entries of `blocks` are holes: those blocks are out of the model's window, and not owned.
    While its blocks are `lent`, a transfer reads or writes them, and they cannot be released. The first `num_published`
    of them are in the prefix cache. Of the tokens, `num_request_tokens` came with the request, and `num_cached` were
    found in a prefix cache, `num_restored` of these in a tier below memory; `num_expected_hits` were there when the
    request came, or are being read by `read`, during which nothing of it is computed. Times are engine clock, in
    seconds: the first token is due at `due_at`, infinity without a goal. `adapter`: the place of the one that it uses.
    While it `awaits_mask`, the mask thread uses its constraint, and no step samples for it. `allowed_mask` has the bits
    of the request's `allowed_token_ids`; the first step that needs them computes them. `problems` are the errors that
    prevent sampling; the sequence fails with the first.
    """

    router: bytes
    request: PrefillRequest | DecodeRequest
    token_ids: list[int]
    hasher: BlockHasher
    accepted_at: float
    deadline: float
    blocks: list[int] = field(default_factory=list)
    num_gone: int = 0
    lent: bool = False
    num_request_tokens: int = field(init=False)
    due_at: float = field(init=False)
    num_computed: int = 0
    num_published: int = 0
    num_cached: int = 0
    num_expected_hits: int = 0
    admitted_at: float = 0.0
    constraint: Constraint | None = None
    awaits_mask: bool = False
    allowed_mask: Tensor | None = None
    problems: list[str] = field(default_factory=list)
    read: BlockRead | None = None
    num_restored: int = 0
    adapter: int = -1

    def __post_init__(self) -> None:
        self.num_request_tokens = len(self.token_ids)
        self.due_at = self.accepted_at + self.request.ttft_s if self.request.ttft_s else math.inf

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
    def priority(self) -> int:
        """The priority of the request's class: the highest has its turn first."""
        return self.request.priority

    @property
    def awaits_grammar(self) -> bool:
        """Whether the grammar of its answer is still being compiled: it gets no blocks before that."""
        return bool(self.params.grammar) and self.constraint is None

    def note_problem(self, error: Exception) -> None:
        """Record an error that prevents sampling. The sequence fails with the first one."""
        log.error("request %s cannot be sampled", self.request_id, exc_info=error)
        self.problems.append(f"the request cannot be sampled: {type(error).__name__}: {error}")

    @property
    def owned_blocks(self) -> list[int]:
        return self.blocks[self.num_gone :]

    @property
    def num_owned(self) -> int:
        return len(self.blocks) - self.num_gone

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the client's prompt, without the output of earlier attempts."""
        return self.num_request_tokens - self.request.num_output_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def has_output(self) -> bool:
        """Whether its client has begun to read, from this worker or an earlier attempt."""
        return self.num_output_tokens > 0

    @property
    def num_begun(self) -> int:
        """Tokens behind which the next step goes on."""
        return self.num_computed

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is still to be computed, by steps that are not launched yet."""
        return len(self.token_ids) - self.num_begun

    @property
    def remaining_shape(self) -> StepShape:
        """`num_remaining` as the shape of one step, without what a cache or a tier is expected to hold."""
        return StepShape.of_prompt(max(self.num_begun, self.num_expected_hits), len(self.token_ids))

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether its router still lacks log-probabilities of the prompt that the request asks for."""
        return self.params.prompt_logprobs >= 0 and not self.request.num_output_tokens

    @property
    def num_cacheable(self) -> int:
        """Leading tokens whose KV may come from the cache. A prefill computes one at least, for its logits.

        The cache holds neither the logits nor the hidden states of its tokens.
        """
        needs_all = self.wants_prompt_logprobs or self.params.pooling == "mean"
        return 0 if needs_all else self.num_tokens - 1
