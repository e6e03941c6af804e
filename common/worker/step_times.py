"""How long an engine's steps take, by their size: its full rate, and from when on a step must be stuck. Pure.

Sizes are counted in tokens weighed by their context and gathered by powers of two. A worker that has computed a few
steps knows within seconds that one hangs; a slow machine, whose honest steps are long, waits as much longer.
"""

from __future__ import annotations

from dataclasses import dataclass

FACTOR = 20.0
"""A step is stuck when it takes this many times what steps of its size took. Machines are shared, and swap."""
FLOOR_S = 3.0
DEVICE_FLOOR_S = 20.0
"""On a GPU: the first launch of a kernel variant compiles it, in the middle of a step like any other."""
LONGEST_S = 60.0
"""For the first step, and for all but those that honestly come near it."""
LEAST_FACTOR = 3.0
CONTEXT_TOKENS = 2048
"""A token behind this many others counts as two."""
SMOOTHING = 0.2
FORGETTING = 0.02
FULL_TOKENS = 64
"""Steps of fewer tokens read every weight for next to nothing: they say little about the rate of full ones."""


class StepRate:
    """What recent steps took, and how many tokens a second they computed, for heartbeats and metrics."""

    def __init__(self) -> None:
        self.tokens_per_s = self.step_time_s = 0.0

    def add(self, num_tokens: int, step_s: float) -> None:
        self.step_time_s += SMOOTHING * (step_s - self.step_time_s)
        self.tokens_per_s += SMOOTHING * (num_tokens / max(step_s, 1e-6) - self.tokens_per_s)


@dataclass(slots=True)
class _Class:
    """What steps of about one size took: smoothed, and the slowest, which is forgotten slowly."""

    num_tokens: float
    mean_s: float
    slow_s: float

    def add(self, num_tokens: int, step_s: float) -> None:
        self.num_tokens += SMOOTHING * (num_tokens - self.num_tokens)
        self.mean_s += SMOOTHING * (step_s - self.mean_s)
        self.slow_s = max(step_s, self.slow_s + FORGETTING * (step_s - self.slow_s))


def work_of(num_tokens: int, context: int) -> float:
    """The size of a chunk of `num_tokens` whose last token sees `context` tokens."""
    return num_tokens * (1.0 + context / CONTEXT_TOKENS)


class StepTimes:
    """Steps that were computed, by size. `fixed_s` above 0 is the limit for every step, whatever steps took.

    `token_s` is what each token of a small step took when the worker warmed up: it gives a slow machine time for its
    first step, of which nothing else is known. Tokens of large steps take less.
    """

    def __init__(self, *, fixed_s: float = 0.0, floor_s: float = FLOOR_S, token_s: float = 0.0) -> None:
        self._fixed_s, self._floor_s, self._token_s = fixed_s, floor_s, token_s
        self._classes: dict[int, _Class] = {}

    def add(self, num_tokens: int, work: float, step_s: float) -> None:
        """A step of `num_tokens`, weighed `work`, took `step_s` seconds."""
        key = int(work).bit_length()
        known = self._classes.get(key)
        if known is None:
            self._classes[key] = _Class(num_tokens, step_s, step_s)
        else:
            known.add(num_tokens, step_s)

    @property
    def idle_limit_s(self) -> float:
        """How long a turn without a step may take."""
        return self._fixed_s or self._floor_s

    def limit_s(self, work: float) -> float:
        """How long a step may take before it must be stuck."""
        if self._fixed_s:
            return self._fixed_s
        expected = self._expected_s(int(work).bit_length())
        if expected is None:
            return max(LONGEST_S, LEAST_FACTOR * self._token_s * work)
        return max(min(LONGEST_S, max(self._floor_s, FACTOR * expected)), LEAST_FACTOR * expected)

    @property
    def full_tokens_per_s(self) -> float:
        """Tokens a second of the size of step that computes most of them; 0 until a step of some size was seen."""
        full = [known for known in self._classes.values() if known.num_tokens >= FULL_TOKENS]
        return max((known.num_tokens / max(known.mean_s, 1e-6) for known in full), default=0.0)

    def _expected_s(self, key: int) -> float | None:
        """What a step of this size takes at worst: as the next larger known one, or by the ratio to a smaller one."""
        larger = [size for size in self._classes if size >= key]
        if larger:
            return self._classes[min(larger)].slow_s
        if not self._classes:
            return None
        size = max(self._classes)
        return float(self._classes[size].slow_s * 2 ** (key - size))
