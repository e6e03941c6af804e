"""From logits to tokens. A row's token depends on its own logits, parameters, seed and position, and on nothing else.

Order of operations on a row (vLLM's): logit bias; repetition, frequency and presence penalties; banned tokens; what a
grammar forbids; temperature; then the filters min_p, top_k, top_p, each a threshold on probability, so that tokens of
equal probability stay or go together and no sort order matters. The token is then the inverse of the cumulative
distribution in token id order at one uniform number, which is a counter-based function of (seed, position).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.common.model.grammar import Constraint
from diptych.common.model.runner import on_device
from diptych.common.model.scores import token_scores
from diptych.common.sampling_params import SampledToken, SamplingParams
from diptych.kernels import Draw, SamplingTensors, sample

BANNED = -1e30
"""Below every logit, and above what a grammar forbids."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One sequence to sample for. `position` is the absolute position of the new token: the number of tokens before it.

    `banned` are token ids that must not come now, such as end tokens while `min_tokens` is not reached, unless they are
    all that `constraint` allows. With one, `output_token_ids` are all of the answer so far.
    """

    params: SamplingParams
    position: int
    output_token_ids: Sequence[int] = ()
    prompt_token_ids: Sequence[int] = ()
    banned: tuple[int, ...] = ()
    constraint: Constraint | None = None


class Sampler:
    """Stateless but for the vocabulary's size."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """One token per row of `logits`, float32 [n, vocab_size], which is not modified.

        The token of a row without finite logits, or whose grammar allows nothing, is `vocab_size` or more.
        """
        if logits.shape != (len(rows), self.vocab_size):
            raise ValueError(f"logits are {list(logits.shape)}, expected [{len(rows)}, {self.vocab_size}]")
        if not rows:
            return []
        with on_device(logits.device), torch.inference_mode():
            logits = logits.float()
            token_ids = self._draw(logits, rows).tolist()
            return [self._finish(logits[i], row, token_ids[i]) for i, row in enumerate(rows)]

    def can_launch(self, rows: Sequence[SamplingRow]) -> bool:
        """Whether `launch` serves these rows: nothing about them needs their earlier tokens or log-probabilities."""
        return all(row.params.logprobs < 0 and row.constraint is None and not _adjusts(row) for row in rows)

    def launch(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """The same tokens as `sample` gives, int64 [n] on the logits' device, without waiting for them.

        Only for rows that it `can_launch`.
        """
        with torch.inference_mode():
            logits = logits.float()
            if logits.device.type == "cuda" and all(row.params.greedy for row in rows):
                return torch.argmax(logits, dim=-1)
            return self._draw(logits, rows)

    def _draw(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """All rows at once: those that are adjusted are copies."""
        adjusts = [_adjusts(row) for row in rows]
        whole: Tensor | list[Tensor] = logits
        if any(adjusts):
            whole = [_adjusted(logits[i], row) if adjusts[i] else logits[i] for i, row in enumerate(rows)]
        allowed = [None if row.constraint is None else row.constraint.allowed(row.output_token_ids) for row in rows]
        return sample(whole, SamplingTensors.pack([_draw_of(row) for row in rows], logits.device), allowed)

    def _finish(self, logits: Tensor, row: SamplingRow, token_id: int) -> SampledToken:
        if row.params.logprobs < 0 or token_id >= self.vocab_size:  # logits that are not numbers have no such
            return SampledToken(token_id)
        return SampledToken(token_id, token_scores(logits[None], [token_id], row.params.logprobs)[0])


def _draw_of(row: SamplingRow) -> Draw:
    params = row.params
    temperature = 0.0 if params.greedy else params.temperature
    return Draw(temperature, params.top_k, params.top_p, params.min_p, params.seed, row.position)


def _adjusts(row: SamplingRow) -> bool:
    params = row.params
    return bool(
        row.banned
        or params.logit_bias
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
    )


def _adjusted(logits: Tensor, row: SamplingRow) -> Tensor:
    """A copy of one row [vocab] with bias, penalties and bans applied."""
    params, vocab, device = row.params, logits.shape[0], logits.device
    logits = torch.from_numpy(logits.numpy().copy()) if device.type == "cpu" else logits.clone()  # one thread does
    bias = [(token, value) for token, value in params.logit_bias if 0 <= token < vocab]
    if bias:
        index = torch.tensor([token for token, _ in bias], device=device)
        logits.index_add_(0, index, torch.tensor([value for _, value in bias], device=device))
    if params.repetition_penalty != 1.0:
        seen = {*row.prompt_token_ids, *row.output_token_ids}
        index = torch.tensor(sorted(seen), dtype=torch.int64, device=device)
        value = logits[index]
        logits[index] = torch.where(value > 0, value / params.repetition_penalty, value * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and row.output_token_ids:
        output = torch.tensor(row.output_token_ids, dtype=torch.int64, device=device)
        index, count = torch.unique(output, return_counts=True)
        logits[index] -= params.frequency_penalty * count + params.presence_penalty
    banned = [token for token in row.banned if 0 <= token < vocab]
    if banned:
        logits[torch.tensor(banned, device=device)] = BANNED
    return logits
