"""State of a request on a worker, and the rules for accepting requests and ending sequences. Pure.

Prefill and decode workers must apply the same rules.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.blocks import BlockHasher
from common.engine.kv.tiers import BlockRead
from common.errors import WireError
from common.grammar import TokenLimits, finish_reason, num_output_needed, token_limits
from common.latency import StepShape
from common.wire import TOKEN_BYTES, Pooling, SamplingParams, unpack_tokens
from common.wire.messages import DecodeRequest, PrefillRequest

if TYPE_CHECKING:
    from torch import Tensor

    from common.grammar import Constraint, Grammars


log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class WorkerSequence:
    """A request on a worker. `token_ids`: prompt and output. `blocks`: KV of the first `num_computed` of them.

    The first `num_gone` entries of `blocks` are holes: those blocks are outside the model's window and not owned. While
    the blocks are `lent`, a transfer reads or writes them, and they cannot be released. The first `num_published`
    blocks are in the prefix cache.

    `num_request_tokens` tokens came with the request. `num_cached` of them were found in a prefix cache, including
    `num_restored` in a tier below memory. `num_expected_hits` were cached when the request arrived, or are being read
    by `read`, during which the sequence is not computed.

    Times are monotonic, in seconds. The first token is due at `due_at`, infinity without a goal. `adapter` is the
    sequence's adapter slot. While it `awaits_mask`, the mask thread uses its constraint, and no step samples for it.
    `allowed_mask` contains the bits of the request's `allowed_token_ids`, computed on first use. `problems` are errors
    that prevent sampling; the sequence fails with the first one.
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
        """Priority of the request's class. Higher values are served first."""
        return self.request.priority

    @property
    def awaits_grammar(self) -> bool:
        """Whether the grammar is still being compiled. The sequence gets no blocks until then."""
        return bool(self.params.grammar) and self.constraint is None

    def note_problem(self, error: Exception) -> None:
        """Record an error that prevents sampling. The sequence fails with the first one."""
        log.error("request %s: sampling failed", self.request_id, exc_info=error)
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
        """Tokens of the client's prompt, excluding the output of earlier attempts."""
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
        """Number of tokens after which the next step starts."""
        return self.num_computed

    @property
    def num_remaining(self) -> int:
        """Number of tokens whose KV must be computed by steps that are not launched yet."""
        return len(self.token_ids) - self.num_begun

    @property
    def remaining_shape(self) -> StepShape:
        """`num_remaining` as the shape of one step, without tokens expected in a cache or tier."""
        return StepShape.of_prompt(max(self.num_begun, self.num_expected_hits), len(self.token_ids))

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the request's prompt logprobs have not been reported yet."""
        return self.params.prompt_logprobs >= 0 and not self.request.num_output_tokens

    @property
    def num_cacheable(self) -> int:
        """Number of leading tokens whose KV may be cached. At least one token is computed, for its logits.

        The cache contains neither logits nor hidden states.
        """
        needs_all = self.wants_prompt_logprobs or self.params.pooling == "mean"
        return 0 if needs_all else self.num_tokens - 1


class RequestRules:
    """Request limits, in tokens. `max_model_len`: prompt plus output. `max_prompt_len`: prompt."""

    def __init__(
        self,
        eos_token_ids: Collection[int],
        *,
        vocab_size: int,
        max_model_len: int,
        max_prompt_len: int,
        grammars: Grammars | None = None,
        pooling: Pooling = "",
    ) -> None:
        """`pooling`: how this worker pools prompts; "" if it generates text."""
        self._pooling = pooling
        self._eos, self._knows_grammars = tuple(eos_token_ids), grammars is not None
        self._to_bytes = grammars.to_bytes if grammars is not None else None
        self.vocab_size, self.max_model_len, self._max_prompt_len = vocab_size, max_model_len, max_prompt_len

    def prompt(self, request: PrefillRequest | DecodeRequest) -> list[int]:
        """Return the prompt's tokens. Raises WireError for an invalid or unsupported request."""
        token_ids = unpack_tokens(request.prompt)
        if not token_ids:
            raise WireError("the prompt is empty")
        if len(token_ids) > self._max_prompt_len:
            raise WireError(f"the prompt has {len(token_ids)} tokens, the maximum is {self._max_prompt_len}")
        if max(token_ids) >= self.vocab_size:
            raise WireError(f"token id {max(token_ids)} is outside of the vocabulary of {self.vocab_size}")
        self._check_pooling(request)
        if request.num_output_tokens >= len(token_ids):
            raise WireError(f"invalid num_output_tokens {request.num_output_tokens} of {len(token_ids)} tokens")
        if request.params.thinking is not None and max(request.params.thinking.end) >= self.vocab_size:
            raise WireError(f"invalid thinking end token {max(request.params.thinking.end)}")
        if any(len(word.beginning) % TOKEN_BYTES for word in request.params.bad_words):
            raise WireError("invalid bad word: must be a list of token ids")
        if request.params.grammar and not self._knows_grammars:
            raise WireError("this worker does not support grammars")
        return token_ids

    def _check_pooling(self, request: PrefillRequest | DecodeRequest) -> None:
        asked, mine = request.params.pooling, self._pooling
        if asked != mine:
            wanted = f"pooling {asked!r}" if asked else "generated text"
            gives = f"supports pooling {mine!r}" if mine else "generates text"
            raise WireError(f"the request requires {wanted}, but this worker {gives}")
        if asked and isinstance(request, PrefillRequest) and request.decode is not None:
            raise WireError("a pooled prompt must not have a decode worker")

    def limits(self, sequence: WorkerSequence, drafted: Sequence[int] = (), num_unseen: int = 0) -> TokenLimits:
        """Return the limits on the token after the sequence, `num_unseen` tokens in flight and those `drafted`.

        Bad words and the end of thinking are only correct without unseen tokens.
        """
        params = sequence.params
        num_output = sequence.num_output_tokens + num_unseen + len(drafted)
        end: tuple[int, ...] = ()
        if params.bad_words or params.thinking is not None:
            needed = num_output_needed(params, num_output)
            first = max(sequence.num_prompt_tokens, sequence.num_tokens - needed)
            end = (*sequence.token_ids[first:], *drafted)
        return token_limits(params, self._eos, num_output, end, self._to_bytes)

    def finish_reason(self, sequence: WorkerSequence, token_id: int, num_more: int = 0) -> str:
        """Return "stop", "length" or "" (continue), given the sequence's last token `token_id`.

        `num_more` tokens, including `token_id`, are not in the sequence yet.
        """
        num_tokens = len(sequence.token_ids) + num_more
        return finish_reason(
            sequence.request.params,
            self._eos,
            num_output_tokens=num_tokens - sequence.num_prompt_tokens,
            token_id=token_id,
            num_tokens=num_tokens,
            max_model_len=self.max_model_len,
        )
