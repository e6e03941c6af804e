"""Answers that must match a grammar: which tokens may come next, after those that an answer has.

A grammar is text of the library llguidance: a JSON schema, a regular expression or rules in Lark's form, which the
router has checked. Where an answer stands in it is a function of its tokens alone, so a request that moves to another
worker goes on there as it would have here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import llguidance
import numpy as np
import torch
from torch import Tensor

from common.grammar.vocabulary import brief

WORD = 32


class Constraint:
    """One answer's place in its grammar. Owned by whoever samples for the answer."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher | None,
        vocab_size: int,
        problem: str = "",
        on_problem: Callable[[], None] = lambda: None,
    ) -> None:
        """`matcher` is None where a `problem` kept it from being made. `on_problem` hears of one that comes later."""
        self._matcher, self._vocab_size, self._on_problem = matcher, vocab_size, on_problem
        self._num_taken = 0
        self._forced: list[int] = []
        self.problem = problem
        """Why nothing more can come, or ""."""

    def allowed(self, output_token_ids: Sequence[int]) -> Tensor:
        """What may follow these tokens, which begin with those of the call before: a bit a token, 32 in each int32.

        An end token may come where the grammar is satisfied, and only such where nothing can be added. None may
        where there is a `problem`: tokens outside of the grammar, or a grammar beyond the library's bounds.
        """
        mask = np.zeros(-(-self._vocab_size // WORD), dtype=np.int32)
        if self._matcher is not None and not self.problem:
            self._follow(self._matcher, output_token_ids)
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._matcher.is_error():
                self.problem = brief(self._matcher.get_error())
                self._on_problem()
                mask[:] = 0
        return torch.from_numpy(mask)

    def forced(self, output_token_ids: Sequence[int]) -> list[int]:
        """What must follow these tokens, as a tokenizer writes it; others may spell the same text. None at an end."""
        if self._matcher is None or self.problem:
            return []
        self._follow(self._matcher, output_token_ids)
        if not self._forced and not self._matcher.is_stopped() and not self._matcher.is_error():
            self._forced = self._matcher.compute_ff_tokens()
        return self._forced

    def num_allowed(self, output_token_ids: Sequence[int], drafted: Sequence[int]) -> int:
        """How many of the tokens `drafted`, none of which is an end, may follow these tokens one after the other."""
        if self._matcher is None or self.problem:
            return 0
        self._follow(self._matcher, output_token_ids)
        return 0 if self._matcher.is_stopped() else self._matcher.validate_tokens(list(drafted))

    def copy(self) -> Constraint:
        """The same place, to be followed on its own from here."""
        matcher = self._matcher and self._matcher.deep_copy()
        copied = Constraint(matcher, self._vocab_size, self.problem, self._on_problem)
        copied._num_taken = self._num_taken
        return copied

    def _follow(self, matcher: llguidance.LLMatcher, output_token_ids: Sequence[int]) -> None:
        for token_id in output_token_ids[self._num_taken :]:
            self._num_taken += 1
            # A long text that is forced is found once, and followed from then on.
            self._forced = self._forced[1:] if self._forced[:1] == [token_id] else []
            if not matcher.is_stopped():  # behind an end, `ignore_eos` asks for more of the same
                matcher.consume_token(token_id)


def unsampled(constraint: Constraint | None, phase: str) -> tuple[str, str]:
    """In which phase, and why, a request fails for which the sampler found no token."""
    if constraint is not None and constraint.problem:
        return "grammar", constraint.problem
    return phase, "its logits are not finite numbers: nothing can be sampled"
