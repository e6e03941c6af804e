"""Draft head of the served model: drafts the next tokens from hidden states of the model's last step.

    hidden state of token n - 2, token n - 1  ─> draft token n      (a draft step: one row per sequence)
    the head's own state,        token n      ─> draft token n + 1  ...

Draft steps write KV to slots of the sequence's blocks whose tokens are not computed yet. The step that verifies the
draft tokens overwrites them, from the model's hidden states.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.engine.kv import BlockCounts
from common.engine.models import NO_SLOT, ForwardBatch, SequenceChunk
from common.engine.models.draft_heads import DraftingModel
from common.engine.run import ModelRunner
from common.engine.sampling import Sampler
from common.engine.sequences import HiddenStateSlots
from decode_worker.drafting.row_costs import RowCosts
from kernels import on_device

if TYPE_CHECKING:
    from decode_worker.rules import DecodeRules
    from decode_worker.sequence import DecodeSequence


@dataclass(slots=True, eq=False)
class _HeadChain:
    """Draft of one sequence so far, with at most `limit` tokens."""

    sequence: DecodeSequence
    limit: int
    token_ids: list[int] = field(default_factory=list)

    def next_chunk(self, hidden: HiddenStateSlots) -> SequenceChunk:
        """Return the chunk of the newest token. The first one has the slot of the hidden state before it."""
        sequence, place = self.sequence, self.sequence.num_tokens - 1 + len(self.token_ids)
        before = NO_SLOT if self.token_ids else hidden.at(sequence, place - 1)
        newest = self.token_ids[-1] if self.token_ids else sequence.token_ids[-1]
        return SequenceChunk((newest,), place, sequence.blocks, before=before)

    def goes_on(self, rules: DecodeRules) -> bool:
        return len(self.token_ids) < self.limit and not rules.may_end(self.sequence, self.token_ids[-1])


class HeadDrafter:
    """Drafts with a draft head. Owns no blocks and never has to catch up, because steps of the model write its KV.

    Draft tokens are sampled as in `Drafter`: like the tokens themselves.
    """

    token_s = 0.0
    counts = BlockCounts(0, 0, 0)

    def __init__(
        self,
        runner: ModelRunner,
        model: DraftingModel,
        sampler: Sampler,
        hidden: HiddenStateSlots,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`runner` runs steps of `model`. `hidden` maps tokens to slots of hidden states."""
        self.costs, self.hidden = RowCosts(), hidden
        self._runner, self._model, self._sampler, self._clock = runner, model, sampler, clock

    def is_ready(self, sequence: DecodeSequence) -> bool:
        """Whether the last step (possibly in flight) was on this worker and had a slot for its hidden state."""
        return self.hidden.at(sequence, sequence.num_planned - 2) != NO_SLOT

    def num_behind(self, sequence: DecodeSequence) -> int:
        return 0

    def catch_up(self, sequence: DecodeSequence, most_tokens: int) -> int:
        return 0

    def draft(
        self, wanted: Sequence[tuple[DecodeSequence, int]], rules: DecodeRules
    ) -> dict[DecodeSequence, tuple[int, ...]]:
        chains = [_HeadChain(sequence, limit) for sequence, limit in wanted if limit > 0 and self.is_ready(sequence)]
        active, before = chains, None
        while active:
            began = self._clock()
            logits, hidden = self._run([each.next_chunk(self.hidden) for each in active], before)
            drawn = self._sampler.draw(logits, [rules.row(each.sequence, tuple(each.token_ids)) for each in active])
            for chain, token_id in zip(active, drawn, strict=True):
                chain.token_ids.append(token_id)
            self.costs.add(len(active), self._clock() - began)
            left = [row for row, each in enumerate(active) if each.goes_on(rules)]
            before = hidden if len(left) == len(active) else hidden[left]
            active = [active[row] for row in left]
        return {chain.sequence: tuple(chain.token_ids) for chain in chains}

    def retain(self, is_here: Callable[[DecodeSequence], bool]) -> None:
        """Nothing to do: the engine releases the slots of sequences."""

    def reset(self) -> None:
        """Nothing to do: there is no cache."""

    def check_integrity(self) -> None:
        """Nothing to check: there are no blocks."""

    def _run(self, chunks: Sequence[SequenceChunk], before: Tensor | None) -> tuple[Tensor, Tensor]:
        kv = self._runner.kv
        with on_device(kv.device), torch.inference_mode():
            batch = ForwardBatch.build(chunks, self._model.draft_config, kv)
            return self._model.draft(batch, kv, before)
