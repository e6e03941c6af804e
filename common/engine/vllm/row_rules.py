"""Penalties, bad words and thinking budgets of one sequence, applied to its logits. Does not load vLLM."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from common.engine.vllm.requests import TokenRules
from common.grammar import BANNED, num_output_needed, token_limits

TokensFrom = Callable[[int], Tensor]
"""Returns the tokens of a sequence from a position on, int64 [n], on the device of the logits."""


class RowRules:
    """Rules of one sequence, with the counts of its tokens so far."""

    def __init__(self, rules: TokenRules) -> None:
        self._start, self._params = rules.start, rules.sampling
        self._num_counted = 0
        self._output: Tensor | None = None
        self._seen: Tensor | None = None

    def apply(self, logits: Tensor, num_tokens: int, tokens_from: TokensFrom) -> None:
        """Change the logits of the token after `num_tokens` tokens, float32 [vocab_size], in place."""
        params = self._params
        if params.has_penalties:
            self._count(logits, num_tokens, tokens_from)
            self._penalise(logits)
        if not params.bad_words and params.thinking is None:
            return
        num_output = num_tokens - self._start
        needed = min(num_output, num_output_needed(params, num_output))
        end = tokens_from(num_tokens - needed).tolist() if needed else []
        limits = token_limits(params, (), num_output, end)
        if limits.banned:
            banned = torch.tensor(limits.banned, device=logits.device)
            logits[banned] = logits[banned].clamp(max=BANNED)
        # A forced token that the grammar forbids has no effect: it would split a character.
        if limits.forced is not None and logits[limits.forced] > -math.inf:
            kept = logits[limits.forced].clone()
            logits.fill_(-math.inf)
            logits[limits.forced] = kept

    def _count(self, logits: Tensor, num_tokens: int, tokens_from: TokensFrom) -> None:
        if self._output is None or self._seen is None:
            self._output = torch.zeros_like(logits)
            self._seen = torch.zeros_like(logits, dtype=torch.bool)
        if num_tokens <= self._num_counted:
            return
        new = tokens_from(self._num_counted)
        self._seen[new] = True
        of_output = new[max(0, self._start - self._num_counted) :]
        self._output.index_add_(0, of_output, torch.ones_like(of_output, dtype=logits.dtype))
        self._num_counted = num_tokens

    def _penalise(self, logits: Tensor) -> None:
        """Apply penalties like vLLM, in the same order."""
        assert self._output is not None and self._seen is not None  # counted before
        params = self._params
        if params.repetition_penalty != 1.0:
            factor = torch.where(logits > 0, 1.0 / params.repetition_penalty, params.repetition_penalty)
            logits.mul_(torch.where(self._seen, factor, 1.0))
        logits.sub_(self._output, alpha=params.frequency_penalty)
        logits.sub_((self._output > 0).to(logits.dtype), alpha=params.presence_penalty)


class HostRow:
    """Rules of a sequence whose output vLLM appends to a list."""

    def __init__(self, rules: TokenRules, prompt: list[int], output: list[int]) -> None:
        self._rules, self._prompt, self._output = RowRules(rules), prompt, output

    def apply(self, logits: Tensor) -> None:
        # With asynchronous scheduling, tokens that are not sampled yet are -1, at the end.
        output = [token_id for token_id in self._output if token_id >= 0]
        prompt = self._prompt

        def tokens_from(first: int) -> Tensor:
            found = prompt[first:] + output[max(0, first - len(prompt)) :]
            return torch.tensor(found, dtype=torch.int64, device=logits.device)

        self._rules.apply(logits, len(prompt) + len(output), tokens_from)
