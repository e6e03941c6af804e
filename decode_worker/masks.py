"""Grammar masks of decode steps: computed within their step, or on the mask thread while other answers continue.

    fast grammar   launch N+1 ── tokens of N ── masks of N+1 ── launch N+2 ...       while the model of N+1 runs
    slow grammar   tokens of N ── mask thread, one or more steps ── launch N+k ...   the answer skips these steps

A step's masks have a time budget. A sequence whose mask exceeds it is deferred: the step samples nothing for it, and
its last token is computed again when its mask is ready.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from common.engine.sampling import SamplingRow
from common.engine.sequences import AwaitedGrammars
from common.grammar import Constraint
from decode_worker.rules import DecodeRules
from decode_worker.sequence import DecodeSequence
from decode_worker.step import DecodeChunk

STEP_S = 0.05
"""Time budget of the masks of one step, in seconds. The last mask may exceed it."""


class StepMasks:
    """Computes and requests masks. Not thread-safe: use only from the engine thread."""

    def __init__(self, rules: DecodeRules, grammars: AwaitedGrammars[DecodeSequence]) -> None:
        self._rules, self._grammars = rules, grammars

    def ask_slow(self, running: Iterable[DecodeSequence]) -> None:
        """Request the masks of slow grammars for the sequences that would sample in the next step."""
        for sequence in running:
            constraint = sequence.constraint
            if constraint is None or not constraint.is_slow or sequence.skips_step or sequence.num_remaining != 1:
                continue
            if not constraint.has_mask(sequence.num_output_tokens):
                self._grammars.ask_mask(sequence, constraint)

    def follows_tokens(self, sequence: DecodeSequence) -> bool:
        """See `DecodeRules.follows_tokens`."""
        return self._rules.follows_tokens(sequence)

    def rows(self, chunks: Sequence[DecodeChunk]) -> list[Sequence[SamplingRow]]:
        """Return the rows of each chunk, with their masks; none for a deferred sequence."""
        began, rows_of = time.monotonic(), list[Sequence[SamplingRow]]()
        for chunk in chunks:
            sequence, constraint = chunk.sequence, chunk.sequence.constraint
            is_late = time.monotonic() - began > STEP_S
            if constraint is not None and self._must_wait(sequence, constraint, is_late=is_late):
                sequence.deferred = True
                if not sequence.awaits_mask:
                    self._grammars.ask_mask(sequence, constraint)
                rows_of.append(())
                continue
            rows = self._rules.rows(chunk)
            for row in rows:
                if row.constraint is not None:
                    row.constraint.allowed(row.output_token_ids)
            rows_of.append(rows)
        return rows_of

    @staticmethod
    def _must_wait(sequence: DecodeSequence, constraint: Constraint, *, is_late: bool) -> bool:
        if sequence.awaits_mask:
            return True
        return (is_late or constraint.is_slow) and not constraint.has_mask(sequence.num_output_tokens)
