"""The parts of one step of a decode worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.latency import StepShape
from decode_worker.drafting.draft_tokens import NOTHING, Draft
from decode_worker.sequence import DecodeSequence


class DecodeChunk(NamedTuple):
    """Compute `num_tokens` tokens of `sequence` from `start` on; sample if that reaches its last token.

    With `all_logits`, the logits of every token are kept: the request wants log-probabilities of its prompt. A single
    token may have a `draft`: the step also runs its tokens as if they were the sequence's, and samples behind each.
    """

    sequence: DecodeSequence
    start: int
    num_tokens: int
    draft: Draft = NOTHING

    @property
    def num_rows(self) -> int:
        """Tokens that the model runs."""
        return self.num_tokens + len(self.draft.token_ids)

    @property
    def num_spans(self) -> int:
        """Chunks that the model runs it as: each draft token is one of its own."""
        return 1 + len(self.draft.token_ids)

    @property
    def sample(self) -> bool:
        return self.start + self.num_tokens == self.sequence.num_planned

    @property
    def is_plain(self) -> bool:
        """Whether parameters and position alone say how its rows are sampled."""
        return self.start + self.num_tokens >= self.sequence.plain_from

    @property
    def all_logits(self) -> bool:
        return self.sequence.wants_prompt_logprobs and self.start + 1 < self.sequence.num_request_tokens


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """Chunks to compute, sequences that got room for KV to arrive, and sequences that lost their blocks."""

    chunks: Sequence[DecodeChunk]
    granted: Sequence[DecodeSequence]
    preempted: Sequence[DecodeSequence]


def shape_of(chunks: Sequence[DecodeChunk]) -> StepShape:
    """What a step of these chunks computes; draft tokens are rows of their own."""
    num_rows = context = 0
    for chunk in chunks:
        if chunk.num_tokens == 1:
            rows = 1 + len(chunk.draft.token_ids)
            num_rows, context = num_rows + rows, context + rows * (chunk.start + 1)
    prompts = (chunk for chunk in chunks if chunk.num_tokens > 1)
    of_prompts = StepShape.sum(StepShape.of_prompt(chunk.start, chunk.start + chunk.num_tokens) for chunk in prompts)
    return StepShape.of_rows(num_rows, context) + of_prompts
