"""Many decode steps at once: as long as the same sequences run and have room, one step is like the next."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from decode_worker.pace import TokenGaps
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import DecodeSequence


class CoalescedScheduler(DecodeScheduler):
    """Production's scheduler, which can also be told of several steps in one call.

    They must be steps that compute one token of each running sequence. What waits stays where it is meanwhile: it did
    not fit before the first of them, and each leaves less room.
    """

    def num_steps_with_room(self, most: int) -> int:
        """How many steps in a row have room, at most `most`; the first one has, as it is scheduled."""
        if self.window:  # blocks go back meanwhile
            most = min(most, self.block_size)
        available = self.pool.num_available
        if len(self.running) * (most // self.block_size + 1) <= available:
            return most
        low, high = 1, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._num_missing_after(middle) <= available else (low, middle - 1)
        return low

    def advance_steps(self, num_steps: int) -> None:
        """Record so many computed steps, and the tokens that they sampled."""
        size, pool = self.block_size, self.pool
        for sequence in self.running:
            start = sequence.num_computed
            end = start + num_steps
            sequence.token_ids.extend((0,) * num_steps)
            wanted = -(-end // size) - len(sequence.blocks)
            if wanted > 0:
                sequence.blocks += pool.allocate(wanted)
            pool.wrote(sequence.blocks, start, end)
            sequence.num_computed = end
            if end // size > sequence.num_published:
                self._publish_full(sequence)
            self._slide(sequence)

    def _num_missing_after(self, num_steps: int) -> int:
        size = self.block_size
        return sum(max(0, -(-(s.num_computed + num_steps) // size) - len(s.blocks)) for s in self.running)


@dataclass(frozen=True, slots=True)
class StepRun:
    """`num_steps` steps in a row, of which the first takes `first_s` and each later one `growth_s` more."""

    began_at: float
    num_steps: int
    first_s: float
    growth_s: float = 0.0

    def seconds(self, num_steps: int) -> float:
        """The time of the first `num_steps` steps."""
        return num_steps * self.first_s + self.growth_s * num_steps * (num_steps - 1) / 2

    def ends(self, num_steps: int) -> Iterator[float]:
        """When each of the first `num_steps` steps ends."""
        began_at, first_s, growth_s = self.began_at, self.first_s, self.growth_s
        for number in range(1, num_steps + 1):
            yield began_at + (number * first_s + growth_s * number * (number - 1) / 2)

    @property
    def ends_at(self) -> float:
        return self.began_at + self.seconds(self.num_steps)

    def num_ended(self, now: float) -> int:
        """How many steps have ended."""
        return self._num_within(max(0.0, now - self.began_at))

    def num_begun(self, now: float) -> int:
        """How many steps have ended or are being computed."""
        passed_s = max(0.0, now - self.began_at)
        num_ended = self._num_within(passed_s)
        return max(1, min(self.num_steps, num_ended + (self.seconds(num_ended) < passed_s)))

    def _num_within(self, passed_s: float) -> int:
        """The most steps that take `passed_s` or less."""
        half, linear = self.growth_s / 2, self.first_s - self.growth_s / 2
        if half <= 0.0:
            estimate = passed_s / linear
        else:
            estimate = (math.sqrt(linear * linear + 4 * half * passed_s) - linear) / (2 * half)
        num_steps = min(self.num_steps, int(estimate))
        while num_steps < self.num_steps and self.seconds(num_steps + 1) <= passed_s:
            num_steps += 1
        while num_steps > 0 and self.seconds(num_steps) > passed_s:
            num_steps -= 1
        return num_steps


class CoalescedGaps(TokenGaps):
    """Production's gaps between tokens, which can also be told of several steps of the same sequences in one call."""

    def ran(self, sequences: Sequence[DecodeSequence], run: StepRun, num_steps: int, predicted_s: float) -> None:
        """The first `num_steps` steps of a run have ended."""
        ends = list(run.ends(num_steps))
        self.stepped(sequences, ends[0], predicted_s=predicted_s, tokens_each=1.0)
        self._goal.observe_all([later - earlier for earlier, later in pairwise(ends)], predicted_s)
        self._at = ends[-1]
