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
from diptych.common.sampling_params import SampledToken, SamplingParams, TokenLogprobs
from diptych.kernels import Draw, SamplingTensors, argmax, sample

LOGPROB_FLOOR = -9999.0
BANNED = -1e30
"""Below every logit, and above what a grammar forbids."""
FEW = 128  # best tokens that top_p looks at before it sorts
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


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
            if logits.device.type == "cuda":
                return self._sample_on_device(logits, rows)
            plain = [row.params.greedy and not _adjusts(row) for row in rows]
            best = argmax(logits).tolist() if any(plain) else []
            return [self._finish(logits[i], row, best[i] if plain[i] else None) for i, row in enumerate(rows)]

    def can_launch(self, rows: Sequence[SamplingRow]) -> bool:
        """Whether `launch` serves these rows: nothing about them needs their earlier tokens or log-probabilities."""
        return all(row.params.logprobs < 0 and not _adjusts(row) for row in rows)

    def launch(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """The same tokens as `sample` gives, int64 [n] on the logits' device, without waiting for them.

        Only for rows that it `can_launch`.
        """
        with torch.inference_mode():
            logits = logits.float()
            if all(row.params.greedy for row in rows):
                return torch.argmax(logits, dim=-1)
            return sample(logits, SamplingTensors.pack([_draw_of(row) for row in rows], logits.device))

    def _sample_on_device(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """All rows that need nothing but a draw in one launch, the others one by one."""
        drawn = [i for i, row in enumerate(rows) if not _adjusts(row)]
        chosen: dict[int, int] = {}
        if drawn:
            some = logits if len(drawn) == len(rows) else logits[drawn]
            chosen = dict(zip(drawn, self.launch(some, [rows[i] for i in drawn]).tolist(), strict=True))
        return [self._finish(logits[i], row, chosen.get(i)) for i, row in enumerate(rows)]

    def _finish(self, logits: Tensor, row: SamplingRow, token_id: int | None) -> SampledToken:
        if token_id is None:
            token_id = self._choose(logits, row)
        if row.params.logprobs < 0 or token_id >= self.vocab_size:  # logits that are not numbers have no such
            return SampledToken(token_id)
        return SampledToken(token_id, _logprobs(logits, token_id, row.params.logprobs))

    def _choose(self, logits: Tensor, row: SamplingRow) -> int:
        adjusted = _adjust(logits, row) if _adjusts(row) else logits
        if not bool(torch.isfinite(adjusted.max())):
            return self.vocab_size
        if row.params.greedy:
            return int(torch.argmax(adjusted))
        return _draw(_filtered(adjusted, row.params), uniform(row.params.seed, row.position))


def _draw_of(row: SamplingRow) -> Draw:
    params = row.params
    temperature = 0.0 if params.greedy else params.temperature
    return Draw(temperature, params.top_k, params.top_p, params.min_p, params.seed, row.position)


def uniform(seed: int, position: int) -> float:
    """The noise of (seed, position): 53 bits in [0, 1).

    splitmix64 (Steele, Lea, Flood 2014) used as a counter-based generator: the seed is mixed into a stream key, and the
    position is the counter of that stream.
    """
    key = _mix((seed + _GOLDEN) & _MASK)
    return (_mix((key + (position + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _adjusts(row: SamplingRow) -> bool:
    params = row.params
    return bool(
        row.banned
        or row.constraint is not None
        or params.logit_bias
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
    )


def _adjust(logits: Tensor, row: SamplingRow) -> Tensor:
    """A copy of one row [vocab] with bias, penalties and bans applied."""
    params, vocab = row.params, logits.shape[0]
    logits = logits.clone()
    bias = [(token, value) for token, value in params.logit_bias if 0 <= token < vocab]
    if bias:
        index = torch.tensor([token for token, _ in bias], device=logits.device)
        logits.index_add_(0, index, torch.tensor([value for _, value in bias], device=logits.device))
    if params.repetition_penalty != 1.0:
        seen = {*row.prompt_token_ids, *row.output_token_ids}
        index = torch.tensor(sorted(seen), dtype=torch.int64, device=logits.device)
        value = logits[index]
        logits[index] = torch.where(value > 0, value / params.repetition_penalty, value * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and row.output_token_ids:
        output = torch.tensor(row.output_token_ids, dtype=torch.int64, device=logits.device)
        index, count = torch.unique(output, return_counts=True)
        logits[index] -= params.frequency_penalty * count + params.presence_penalty
    banned = [token for token in row.banned if 0 <= token < vocab]
    if banned:
        logits[torch.tensor(banned, device=logits.device)] = BANNED
    if row.constraint is not None:
        allowed = row.constraint.allowed(row.output_token_ids).to(logits.device)
        logits = logits.masked_fill_(~allowed, -torch.inf)
    return logits


def _filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities [vocab] after temperature, with what min_p, top_k and top_p drop set to zero. Not normalised."""
    probs = torch.softmax(logits / params.temperature, dim=-1)
    if params.min_p > 0.0:
        probs = _keep(probs, probs.max() * params.min_p)
    if 0 < params.top_k < probs.shape[0]:
        probs = _keep(probs, torch.topk(probs, params.top_k, sorted=True).values[-1])
    if params.top_p < 1.0:
        probs = _keep(probs, _nucleus_threshold(probs, params.top_p))
    return probs


def _keep(probs: Tensor, threshold: Tensor) -> Tensor:
    return torch.where(probs >= threshold, probs, 0.0)


def _nucleus_threshold(probs: Tensor, top_p: float) -> Tensor:
    """Smallest probability in the smallest set of best tokens that holds `top_p` of the mass.

    The set is mostly small, so a few best tokens are tried first. Else all those are sorted that matter: tokens below
    (1 - top_p) / vocab of the mass hold less than 1 - top_p together.
    """
    goal = top_p * probs.sum(dtype=torch.float64)
    ordered = torch.topk(probs, min(FEW, probs.shape[0])).values
    mass = torch.cumsum(ordered, 0, dtype=torch.float64)
    if mass[-1] < goal:
        candidates = probs[probs >= probs.sum() * ((1.0 - top_p) / (2 * probs.shape[0]))]
        ordered = torch.sort(candidates, descending=True).values
        mass = torch.cumsum(ordered, 0, dtype=torch.float64)
    last = torch.searchsorted(mass, goal)
    return ordered[last.clamp_(max=ordered.shape[0] - 1)]


def _draw(probs: Tensor, noise: float) -> int:
    """First token id whose cumulative probability exceeds `noise` of the whole; never one of probability zero."""
    mass = torch.cumsum(probs, 0, dtype=torch.float64)
    return int(torch.searchsorted(mass, mass[-1] * noise, right=True))


def _logprobs(logits: Tensor, token_id: int, count: int) -> TokenLogprobs:
    """Log-softmax of the raw logits at the token, and of the `count` best tokens, ties by lowest id."""
    logprobs = torch.log_softmax(logits, dim=-1).nan_to_num_(nan=LOGPROB_FLOOR).clamp_(min=LOGPROB_FLOOR)
    own = float(logprobs[token_id])
    if count == 0:
        return TokenLogprobs(own)
    count = min(count, logprobs.shape[0])
    floor = torch.topk(logprobs, count).values[-1]
    index = torch.nonzero(logprobs >= floor).flatten().tolist()
    best = sorted(zip(index, logprobs[index].tolist(), strict=True), key=lambda item: (-item[1], item[0]))
    return TokenLogprobs(own, tuple(best[:count]))
