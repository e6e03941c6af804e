"""Answers that must match a grammar: which tokens may follow those of an answer so far.

A grammar is text for the library llguidance: a JSON schema, a regular expression or rules in Lark's form, which the
router has checked. An answer's place in it is a function of its tokens alone, so a request that moves to another worker
continues there as it would have here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import llguidance
import numpy as np
import torch
from torch import Tensor

from common.grammar.vocabulary import MASK_BITS, brief
from common.wire.sampling_params import SamplingParams


class Constraint:
    """One answer's place in its grammar. The sequence that samples the answer owns it."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher | None,
        vocab_size: int,
        problem: str = "",
        on_problem: Callable[[], None] = lambda: None,
    ) -> None:
        """`matcher` is None if the grammar has a `problem`. `on_problem` is called when a problem comes up later."""
        self._matcher, self._vocab_size, self._on_problem = matcher, vocab_size, on_problem
        self._num_taken = 0
        self._forced: list[int] = []
        self.problem = problem
        """Why no token can follow, or ""."""

    def allowed(self, output_token_ids: Sequence[int]) -> Tensor:
        """The tokens that may follow these: a bit for each token, 32 in each int32.

        `output_token_ids` begin with those of the call before. An end token is allowed where the grammar is satisfied.
        No token is allowed after a `problem`: tokens outside of the grammar, or a grammar beyond the library's bounds.
        """
        mask = np.zeros(-(-self._vocab_size // MASK_BITS), dtype=np.int32)
        if self._matcher is not None and not self.problem:
            self._follow(self._matcher, output_token_ids)
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._matcher.is_error():
                self.problem = brief(self._matcher.get_error())
                self._on_problem()
                mask[:] = 0
        return torch.from_numpy(mask)

    def forced(self, output_token_ids: Sequence[int]) -> list[int]:
        """The tokens that must follow these, as a tokenizer spells the forced text; empty where no text is forced."""
        if self._matcher is None or self.problem:
            return []
        self._follow(self._matcher, output_token_ids)
        if not self._forced and not self._matcher.is_stopped() and not self._matcher.is_error():
            self._forced = self._matcher.compute_ff_tokens()
        return self._forced

    def num_allowed(self, output_token_ids: Sequence[int], drafted: Sequence[int]) -> int:
        """How many of the tokens `drafted`, none of them an end token, may follow these one after the other."""
        if self._matcher is None or self.problem:
            return 0
        self._follow(self._matcher, output_token_ids)
        return 0 if self._matcher.is_stopped() else self._matcher.validate_tokens(list(drafted))

    def copy(self) -> Constraint:
        """An independent constraint at the same place."""
        matcher = self._matcher and self._matcher.deep_copy()
        copied = Constraint(matcher, self._vocab_size, self.problem, self._on_problem)
        copied._num_taken = self._num_taken
        return copied

    def _follow(self, matcher: llguidance.LLMatcher, output_token_ids: Sequence[int]) -> None:
        for token_id in output_token_ids[self._num_taken :]:
            self._num_taken += 1
            # A long forced text is computed once, then shortened token by token.
            self._forced = self._forced[1:] if self._forced[:1] == [token_id] else []
            if not matcher.is_stopped():  # with `ignore_eos` tokens follow an end
                matcher.consume_token(token_id)


def unsampled(params: SamplingParams, constraint: Constraint | None, phase: str) -> tuple[str, str]:
    """The phase and the reason with which a request fails for which the sampler found no token."""
    if constraint is not None and constraint.problem:
        return "grammar", constraint.problem
    if params.allowed_token_ids and constraint is not None:
        return "grammar", "none of allowed_token_ids can follow in the form that the answer must have"
    return phase, "its logits are not finite numbers: nothing can be sampled"
