"""Position of an answer in its grammar, and the tokens that may follow.

A grammar is text for the library llguidance: a JSON schema, a regular expression or rules in Lark's format, checked by
the router. The position depends only on the tokens of the answer, so a request that moves to another worker continues
with the same constraint.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import llguidance
import numpy as np
import torch
from torch import Tensor

from common.grammar.vocabulary import MASK_BITS, brief
from common.wire import SamplingParams

SLOW_MASK_S = 0.01
"""CPU time of one mask, in seconds, above which its grammar counts as slow. JSON usually takes 0.1 ms, a schema of
2,000 optional members up to 60 ms."""
FAST_AGAIN = 64
"""Consecutive fast masks after which a grammar no longer counts as slow."""
MASKS_S, MASKS_PER_TOKEN_S = 1.0, 0.05
"""Limit of the CPU time of an answer's masks, in seconds: a constant, plus an amount per token."""


@dataclass(slots=True, eq=False)
class GrammarState:
    """State shared by all answers of a compiled grammar, as they share the library's automaton and its lock.

    While a grammar `is_slow`, only the mask thread may use its constraints: any other thread could wait for the lock
    while it holds the GIL. A grammar `is_spoilt` once an answer has exceeded the library's limits.
    """

    is_spoilt: bool = False
    _num_fast_due: int = 0

    @property
    def is_slow(self) -> bool:
        return self._num_fast_due > 0

    def record_mask(self, mask_s: float) -> None:
        """Record the CPU time of a mask."""
        self._num_fast_due = max(0, self._num_fast_due - 1)
        self.record_other(mask_s)

    def record_other(self, seconds: float) -> None:
        """Record the CPU time of other work. It can make a grammar slow, but not fast again."""
        if seconds > SLOW_MASK_S:
            self._num_fast_due = FAST_AGAIN


class Constraint:
    """Position of one answer in its grammar. Owned by the sequence that samples the answer. Not thread-safe."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher | None,
        vocab_size: int,
        problem: str = "",
        state: GrammarState | None = None,
    ) -> None:
        """`problem` is the reason if there is no `matcher`."""
        self._matcher, self._vocab_size, self._state = matcher, vocab_size, state or GrammarState()
        self._num_taken = 0
        self._forced: list[int] = []
        self._mask: tuple[int, Tensor] | None = None  # number of tokens that precede the mask, mask
        self.spent_s = 0.0
        """CPU time of all masks so far."""
        self.problem = problem
        """Reason why no token can follow, or ""."""

    @property
    def is_slow(self) -> bool:
        """Whether only the mask thread may compute the next mask."""
        return self._state.is_slow

    def has_mask(self, num_tokens: int) -> bool:
        """Whether `allowed` returns at once for an answer of `num_tokens` tokens."""
        return bool(self.problem) or (self._mask is not None and self._mask[0] == num_tokens)

    def allowed(self, output_token_ids: Sequence[int]) -> Tensor:
        """Return the mask of the tokens that may follow: one bit per token, packed into int32. Do not modify it.

        `output_token_ids` must start with those of the previous call. End tokens are allowed where the grammar is
        satisfied. After a `problem` no token is allowed. Problems are tokens that the grammar forbids, a grammar that
        exceeds the library's limits, and masks that exceed the CPU time limit. The mask is cached until the answer
        grows.
        """
        if self._mask is None or self._mask[0] != len(output_token_ids) or self.problem:
            self._mask = len(output_token_ids), self._computed(output_token_ids)
        return self._mask[1]

    def forced(self, output_token_ids: Sequence[int]) -> list[int]:
        """Return the tokens of the text that must follow, or [] where no text is forced."""
        if self._matcher is None or self.problem:
            return []
        began_s = time.thread_time()
        self._follow(self._matcher, output_token_ids)
        if not self._forced and not self._matcher.is_stopped() and not self._matcher.is_error():
            self._forced = self._matcher.compute_ff_tokens()
        self._state.record_other(time.thread_time() - began_s)
        return self._forced

    def num_allowed(self, output_token_ids: Sequence[int], drafted: Sequence[int]) -> int:
        """Return how many leading tokens of `drafted`, none of them an end token, may follow the output."""
        if self._matcher is None or self.problem:
            return 0
        self._follow(self._matcher, output_token_ids)
        return 0 if self._matcher.is_stopped() else self._matcher.validate_tokens(list(drafted))

    def copy(self) -> Constraint:
        """Return an independent constraint at the same position. Its CPU time starts at zero."""
        matcher = self._matcher and self._matcher.deep_copy()
        copied = Constraint(matcher, self._vocab_size, self.problem, self._state)
        copied._num_taken, copied._mask = self._num_taken, self._mask
        return copied

    def _computed(self, output_token_ids: Sequence[int]) -> Tensor:
        mask = np.zeros(-(-self._vocab_size // MASK_BITS), dtype=np.int32)
        if self._matcher is None or self.problem:
            return torch.from_numpy(mask)
        began_s = time.thread_time()
        try:
            self._follow(self._matcher, output_token_ids)
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._matcher.is_error():
                self._state.is_spoilt = True
                self.problem = brief(self._matcher.get_error())
        except Exception as error:  # must not fail the step of other answers
            self._state.is_spoilt = True
            self.problem = f"the grammar cannot be used: {brief(str(error))}"
        took_s = time.thread_time() - began_s
        self._state.record_mask(took_s)
        self.spent_s += took_s
        if not self.problem and self.spent_s > MASKS_S + MASKS_PER_TOKEN_S * len(output_token_ids):
            self.problem = (
                f"the grammar is too ambiguous: computing the allowed tokens took {self.spent_s:.1f} s of CPU time for "
                f"{len(output_token_ids)} tokens of the answer"
            )
        if self.problem:
            mask[:] = 0
        return torch.from_numpy(mask)

    def _follow(self, matcher: llguidance.LLMatcher, output_token_ids: Sequence[int]) -> None:
        for token_id in output_token_ids[self._num_taken :]:
            self._num_taken += 1
            # A long forced text is computed once, then shortened token by token.
            self._forced = self._forced[1:] if self._forced[:1] == [token_id] else []
            if not matcher.is_stopped():  # with `ignore_eos`, tokens follow the end
                matcher.consume_token(token_id)


def sampling_failure(params: SamplingParams, constraint: Constraint | None, phase: str) -> tuple[str, str]:
    """Return the phase and the reason of the error for a request whose sampler had no valid token."""
    if constraint is not None and constraint.problem:
        return "grammar", constraint.problem
    if params.allowed_token_ids and constraint is not None:
        return "grammar", "allowed_token_ids has no token that the answer's format allows next"
    return phase, "the model's logits are not finite, no token can be sampled"
