"""One prompt on a prefill worker, from acceptance until its KV is acknowledged."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.grammar.grammar import Constraint
from common.kv.block_hash import BlockHasher
from common.wire.messages import PrefillRequest
from common.wire.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class PrefillSequence:
    """`blocks` covers the whole prompt from admission on; the first `num_computed` tokens are in them.

    While they are `lent`, the KV sender may read them, and they cannot be released.

    accepted_at ─ admitted_at ─ computed_at ─ released        (engine clock, seconds)
         queue        prefill        hold
    """

    router: bytes
    request: PrefillRequest
    token_ids: list[int]
    hasher: BlockHasher
    accepted_at: float
    deadline: float
    blocks: list[int] = field(default_factory=list)
    lent: bool = False
    num_computed: int = 0
    num_cached: int = 0
    num_published: int = 0
    admitted_at: float = 0.0
    computed_at: float = 0.0
    constraint: Constraint | None = None

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
    def awaits_grammar(self) -> bool:
        """Whether what its answer must match is still being compiled: it is not admitted before."""
        return bool(self.params.grammar) and self.constraint is None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_remaining(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether its router wants the prompt's log-probabilities, and has none yet."""
        return self.request.params.prompt_logprobs >= 0 and not self.request.num_output_tokens

    @property
    def num_cacheable(self) -> int:
        """Leading tokens whose KV may come from a cache. At least one is computed, and all whose logits are needed."""
        return 0 if self.wants_prompt_logprobs else self.num_tokens - 1

    @property
    def computed(self) -> bool:
        return self.num_computed == self.num_tokens
