"""Sampling. A row's token depends only on its own logits, parameters, seed and position.

Order of operations on a row (as in vLLM): logit changes (`LogitChanges.apply`); allowed tokens and grammar;
temperature; then the filters min_p, top_k, top_p. Each filter is a probability threshold, so that tokens of equal
probability are treated alike and no sort order matters. The token is the inverse of the cumulative distribution, in
token ID order, at a uniform number from a counter-based function of (seed, position).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from common.engine.sampling.draw import draw_of
from common.engine.sampling.logprobs import LaunchedLogprobs, WantedLogprobs, launch_logprobs
from common.engine.sampling.penalties import Adjustment, LogitChanges, TokenCounts, adjusts
from common.grammar import FREE, MASK_BITS, Constraint, TokenLimits, token_mask
from common.wire import SampledToken, SamplingParams, TokenLogprobs
from kernels import SamplingTensors, on_device, sample, to_device, to_host

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """A sequence to sample for. `position`: absolute position of the new token, the number of tokens before it.

    Tokens in `limits.banned` are excluded, for example end tokens before `min_tokens`, unless `constraint` or the
    request allows no others. With a constraint, `output_token_ids` is the whole answer so far.

    `counts` covers prompt and output except the last tokens, which are the `draft`. Without it, penalties recount
    `prompt_token_ids` and `output_token_ids`.

    `allowed` is `allowed_mask(params)`, which a sequence computes once. Without it, each step computes the mask.

    If the row's parameters raise an error, the reason is appended to `problems`.
    """

    params: SamplingParams
    position: int
    output_token_ids: Sequence[int] = ()
    prompt_token_ids: Sequence[int] = ()
    limits: TokenLimits = FREE
    constraint: Constraint | None = None
    counts: TokenCounts | None = None
    draft: tuple[int, ...] = ()
    allowed: Tensor | None = None
    problems: list[str] = field(default_factory=list)


UNSAMPLED = SamplingRow(SamplingParams(max_tokens=1, temperature=0.0), 0)
"""A row whose sampled token is discarded."""


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """Host-side inputs for sampling a step's rows. They do not refer to sequences, which may change later.

    None is a row of which only the draw matters, which is on the device. Rows with bias, penalties or bans are
    `adjusted`, by `changes`. `allowed` are masks with 32 tokens per int32.
    """

    rows: Sequence[SamplingRow | None]
    adjusted: Sequence[int]
    changes: LogitChanges | None
    allowed: Sequence[Tensor | None]
    logprobs: Mapping[int, WantedLogprobs]


class LaunchedTokens:
    """Tokens of a step, with the requested logprobs. Created by the thread that launches the step, right afterwards.

    `ids`, int64 [n], are on the device, where the next step reads them.
    """

    def __init__(self, ids: Tensor, logprobs: Sequence[LaunchedLogprobs], vocab_size: int) -> None:
        self.ids, self._logprobs, self._vocab_size = ids, logprobs, vocab_size
        self._host = to_host(ids)
        self._event: torch.cuda.Event | None = None
        if ids.device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> list[SampledToken]:
        """Wait for the step and return a token per row. Raises RuntimeError if it failed on the device.

        A row without finite logits has an invalid ID and no logprobs.
        """
        if self._event is not None:
            self._event.synchronize()
        if not self._logprobs:
            return [SampledToken(token_id) for token_id in self._host.tolist()]
        found: dict[int, TokenLogprobs] = {}
        for launched in self._logprobs:
            found |= zip(launched.rows, launched.read(), strict=True)
        return [
            SampledToken(token_id, found.get(row) if token_id < self._vocab_size else None)
            for row, token_id in enumerate(self._host.tolist())
        ]


class Sampler:
    """Sampler. Its only state is the vocabulary size."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """Sample one token per row of `logits`, float32 [n, vocab_size], which is not modified.

        The ID is at least `vocab_size` for a row without finite logits or allowed tokens.
        """
        if logits.shape != (len(rows), self.vocab_size):
            raise ValueError(f"logits are {list(logits.shape)}, must be [{len(rows)}, {self.vocab_size}]")
        return self.launch(logits, self.prepare(rows)).read() if rows else []

    def draw(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
        """Return the token IDs that `sample` would return, without logprobs."""
        prepared = replace(self.prepare(rows), logprobs={})
        return [token.token_id for token in self.launch(logits, prepared).read()]

    def prepare(self, rows: Sequence[SamplingRow | None]) -> PreparedRows:
        """Prepare a step's rows on the host. All tokens on which rows depend must be known.

        A row whose parameters raise an error gets no token. Other rows are not affected.
        """
        try:
            return self._prepare(rows)
        except Exception:  # raised by one of the rows: find it
            is_sound = [row is None or self._is_sound(row) for row in rows]
        prepared = self._prepare([row if sound else UNSAMPLED for row, sound in zip(rows, is_sound, strict=True)])
        nothing = torch.zeros(-(-self.vocab_size // MASK_BITS), dtype=torch.int32)
        masks = [mask if sound else nothing for mask, sound in zip(prepared.allowed, is_sound, strict=True)]
        return replace(prepared, allowed=masks)

    def _is_sound(self, row: SamplingRow) -> bool:
        try:
            self._prepare([row])
        except Exception as error:
            log.exception("sampling: a row has invalid parameters")
            row.problems.append(f"sampling failed: {type(error).__name__}: {error}")
            return False
        return True

    def _prepare(self, rows: Sequence[SamplingRow | None]) -> PreparedRows:
        wanted = [(i, row) for i, row in enumerate(rows) if row is not None]
        adjusted = [(i, row) for i, row in wanted if row.limits.banned or adjusts(row.params)]
        return PreparedRows(
            rows,
            [i for i, _ in adjusted],
            LogitChanges.of([_adjustment(row) for _, row in adjusted], self.vocab_size) if adjusted else None,
            [None if row is None else _allowed(row, self.vocab_size) for row in rows],
            {i: _wanted(row.params) for i, row in wanted if row.params.logprobs >= 0},
        )

    def launch(self, logits: Tensor, prepared: PreparedRows, draws: SamplingTensors | None = None) -> LaunchedTokens:
        """Launch the sampling that `sample` waits for. On a GPU, the host does not wait.

        `draws`: those of all rows, if they are on the device. Without `draws`, no row may be None.
        """
        with on_device(logits.device), torch.inference_mode():
            logits = logits.float()
            if draws is None:
                rows = [row for row in prepared.rows if row is not None]
                draws = SamplingTensors.pack([draw_of(row.params, row.position) for row in rows], logits.device)
            ids = sample(_adjusted(logits, prepared), draws, prepared.allowed)
            logprobs = launch_logprobs(logits, ids, prepared.logprobs) if prepared.logprobs else ()
            return LaunchedTokens(ids, logprobs, self.vocab_size)


def _wanted(params: SamplingParams) -> WantedLogprobs:
    return WantedLogprobs(params.logprobs, params.logprob_token_ids)


def allowed_mask(params: SamplingParams, vocab_size: int) -> Tensor | None:
    """Pack the request's `allowed_token_ids` into bits: int32 [ceil(vocab_size / 32)]. None without such a list."""
    if not params.allowed_token_ids:
        return None
    return torch.from_numpy(token_mask(params.allowed_token_ids, vocab_size))


def _allowed(row: SamplingRow, vocab_size: int) -> Tensor | None:
    """Return the tokens allowed by the grammar, the request's list and a forced token, as bits; None for all tokens.

    A forced token that the grammar forbids has no effect: it would split a UTF-8 character.
    """
    masks: list[Tensor] = []
    if row.constraint is not None:
        masks.append(row.constraint.allowed(row.output_token_ids))
        if len(masks[0]) != -(-vocab_size // MASK_BITS):  # the kernels read one bit per row of the logits
            raise ValueError(f"the grammar's mask has {32 * len(masks[0])} bits, but the vocabulary has {vocab_size}")
    own = row.allowed if row.allowed is not None else allowed_mask(row.params, vocab_size)
    if own is not None:
        masks.append(own)
    forced = row.limits.forced
    if forced is not None and (row.constraint is None or _has(masks[0], forced)):
        masks.append(torch.from_numpy(token_mask((forced,), vocab_size)))
    return reduce(torch.bitwise_and, masks) if masks else None


def _has(mask: Tensor, token_id: int) -> bool:
    """Whether a packed mask allows a token."""
    return bool(int(mask[token_id // MASK_BITS]) >> token_id % MASK_BITS & 1)


def _adjusted(logits: Tensor, prepared: PreparedRows) -> Tensor | list[Tensor]:
    """Return `logits` [n, vocab], or its rows, with adjusted copies of rows that have bias, penalties or bans."""
    changes, chosen = prepared.changes, prepared.adjusted
    if changes is None:
        return logits
    if logits.device.type == "cpu":
        copies = torch.from_numpy(logits.numpy()[chosen])  # numpy copies on a single thread, which is enough
        changes.apply(copies)
        if len(chosen) == len(logits):
            return copies
        whole = list(logits)
        for place, i in enumerate(chosen):
            whole[i] = copies[place]
        return whole
    (index,) = to_device([np.array(chosen, dtype=np.int64)], logits.device)
    copies = logits.index_select(0, index)
    changes.apply(copies)
    return logits.index_copy(0, index, copies)


def _adjustment(row: SamplingRow) -> Adjustment:
    if row.counts is not None:
        return Adjustment(row.params, row.counts, row.draft, row.limits.banned)
    counts = TokenCounts(row.prompt_token_ids, row.output_token_ids) if row.params.has_penalties else TokenCounts()
    return Adjustment(row.params, counts, (), row.limits.banned)
