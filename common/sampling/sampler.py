"""From logits to tokens. A row's token depends on its own logits, parameters, seed and position, and on nothing else.

Order of operations on a row (vLLM's): logit bias; repetition, frequency and presence penalties; banned tokens; allowed
tokens and the grammar; temperature; then the filters min_p, top_k, top_p, each a threshold on probability, so that
tokens of equal probability stay or go together and no sort order matters. The token is then the inverse of the
cumulative distribution in token id order at one uniform number, which is a counter-based function of (seed, position).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from common.grammar.grammar import Constraint
from common.sampling.logprobs import token_logprobs
from common.sampling.penalties import Adjustment, TokenCounts, adjust, needs_counts
from common.sampling.token_limits import FREE, TokenLimits, token_mask
from common.wire.sampling_params import SampledToken, SamplingParams
from kernels import Draw, SamplingTensors, on_device, sample


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One sequence to sample for. `position` is the absolute position of the new token: the number of tokens before it.

    `limits.banned` must not come now, such as end tokens while `min_tokens` is not reached, unless they are all that
    `constraint`, or the request itself, allows. With one, `output_token_ids` are all of the answer so far.

    `counts` are those of the prompt and the output but for the last tokens, which are a `draft`. Without them penalties
    count `prompt_token_ids` and `output_token_ids` anew.
    """

    params: SamplingParams
    position: int
    output_token_ids: Sequence[int] = ()
    prompt_token_ids: Sequence[int] = ()
    limits: TokenLimits = FREE
    constraint: Constraint | None = None
    counts: TokenCounts | None = None
    draft: tuple[int, ...] = ()


class Sampler:
    """Stateless but for the vocabulary's size."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """One token per row of `logits`, float32 [n, vocab_size], which is not modified.

        The token of a row without finite logits, or for which nothing is allowed, is `vocab_size` or more.
        """
        if logits.shape != (len(rows), self.vocab_size):
            raise ValueError(f"logits are {list(logits.shape)}, expected [{len(rows)}, {self.vocab_size}]")
        if not rows:
            return []
        with on_device(logits.device), torch.inference_mode():
            logits = logits.float()
            token_ids = self._draw(logits, rows).tolist()
            return [self._finish(logits[i], row, token_ids[i]) for i, row in enumerate(rows)]

    def draw(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
        """The token ids that `sample` would give, without their log-probabilities."""
        with on_device(logits.device), torch.inference_mode():
            ids: list[int] = self._draw(logits.float(), rows).tolist()
            return ids

    def can_launch(self, rows: Sequence[SamplingRow]) -> bool:
        """Whether `launch` serves these rows: nothing about them needs their earlier tokens or log-probabilities."""
        return all(row.params.logprobs < 0 and not _adjusts(row) and not _is_held(row) for row in rows)

    def launch(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """The tokens that `sample` would give, int64 [n] on the logits' device, without waiting for them.

        Only for rows that it `can_launch`.
        """
        with torch.inference_mode():
            return self._draw(logits.float(), rows)

    def _draw(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """Draws all rows at once, from copies of those that it adjusts."""
        whole = _adjusted(logits, rows)
        allowed = [_allowed(row, self.vocab_size) if _is_held(row) else None for row in rows]
        return sample(whole, SamplingTensors.pack([_draw_of(row) for row in rows], logits.device), allowed)

    def _finish(self, logits: Tensor, row: SamplingRow, token_id: int) -> SampledToken:
        if row.params.logprobs < 0 or token_id >= self.vocab_size:  # a row without finite logits has none
            return SampledToken(token_id)
        count, others = row.params.logprobs, row.params.logprob_token_ids
        return SampledToken(token_id, token_logprobs(logits[None], [token_id], count, others=others)[0])


def _draw_of(row: SamplingRow) -> Draw:
    params = row.params
    temperature = 0.0 if params.greedy else params.temperature
    return Draw(temperature, params.top_k, params.top_p, params.min_p, params.seed, row.position)


def _adjusts(row: SamplingRow) -> bool:
    return bool(row.limits.banned or row.params.logit_bias or needs_counts(row.params))


def _is_held(row: SamplingRow) -> bool:
    """Whether only some tokens may come, or which they are depends on tokens that may still be in flight."""
    return bool(row.constraint is not None or row.params.allowed_token_ids or row.limits.by_output)


def _allowed(row: SamplingRow, vocab_size: int) -> Tensor | None:
    """The tokens that the grammar, the request's own list and a forced token allow together, as bits."""
    masks: list[Tensor] = []
    if row.constraint is not None:
        masks.append(row.constraint.allowed(row.output_token_ids))
    if row.params.allowed_token_ids:
        masks.append(torch.from_numpy(token_mask(row.params.allowed_token_ids, vocab_size)))
    if row.limits.forced is not None:
        masks.append(torch.from_numpy(token_mask((row.limits.forced,), vocab_size)))
    return reduce(torch.bitwise_and, masks) if masks else None


def _adjusted(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor | list[Tensor]:
    """`logits` [n, vocab], or its rows, of which those with bias, penalties or bans are adjusted copies."""
    chosen = [i for i, row in enumerate(rows) if _adjusts(row)]
    if not chosen:
        return logits
    if logits.device.type == "cpu":
        copies = torch.from_numpy(logits.numpy()[chosen])  # numpy copies with one thread, which is enough
    else:
        copies = logits[torch.tensor(chosen, device=logits.device)]
    adjust(copies, [_adjustment(rows[i]) for i in chosen])
    if len(chosen) == len(rows):
        return copies
    whole = list(logits)
    for place, i in enumerate(chosen):
        whole[i] = copies[place]
    return whole


def _adjustment(row: SamplingRow) -> Adjustment:
    if row.counts is not None:
        return Adjustment(row.params, row.counts, row.draft, row.limits.banned)
    counts = TokenCounts(row.prompt_token_ids, row.output_token_ids) if needs_counts(row.params) else TokenCounts()
    return Adjustment(row.params, counts, (), row.limits.banned)
