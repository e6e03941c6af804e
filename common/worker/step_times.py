"""How long an engine's steps take, by their size: its full rate, and from when on a step must be stuck. Pure.

A step's size counts its tokens, weighted by their context, and steps are grouped by powers of two. A worker that has
computed a few steps sees within seconds that one hangs; a slow machine, whose steps are long, waits longer accordingly.
"""

from __future__ import annotations

from collections import defaultdict

from common.observe.ewma import Ewma

# When a step is stuck, in seconds or as a multiple of what steps of its size took.
FACTOR = 20.0
"""Machines are shared, and swap."""
LEAST_FACTOR = 3.0
FLOOR_S = 3.0
DEVICE_FLOOR_S = 20.0
"""On a GPU the first launch of a kernel variant compiles it, in the middle of any step."""
LONGEST_S = 60.0
"""For the first step, and for every step unless steps of its size take nearly as long."""

# How steps are counted.
CONTEXT_TOKENS = 2048
"""A token with this many tokens before it counts as two."""
FULL_TOKENS = 64
"""A step of fewer tokens spends its time on reading the weights: it says little about the rate of a full one."""
SMOOTHING = 0.2
FORGETTING = 0.02
"""What each step takes from the difference to the slowest one."""


class StepRate:
    """The time and the tokens a second of recent steps, for heartbeats and metrics."""

    def __init__(self) -> None:
        self._step_s, self._tokens_per_s = Ewma(SMOOTHING, 0.0), Ewma(SMOOTHING, 0.0)

    @property
    def step_time_s(self) -> float:
        return self._step_s.value

    @property
    def tokens_per_s(self) -> float:
        return self._tokens_per_s.value

    def add(self, num_tokens: int, step_s: float) -> None:
        self._step_s.observe(step_s)
        self._tokens_per_s.observe(num_tokens / max(step_s, 1e-6))


class _SizeClass:
    """The times of steps of about one size: their average, and the slowest, which is forgotten slowly."""

    def __init__(self) -> None:
        self.num_tokens, self.mean_s, self.slow_s = Ewma(SMOOTHING), Ewma(SMOOTHING), 0.0

    def add(self, num_tokens: int, step_s: float) -> None:
        self.num_tokens.observe(num_tokens)
        self.mean_s.observe(step_s)
        self.slow_s = max(step_s, self.slow_s + FORGETTING * (step_s - self.slow_s))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens.value / max(self.mean_s.value, 1e-6)


def work_of(num_tokens: int, context: int) -> float:
    """The size of a chunk of `num_tokens` whose last token sees `context` tokens."""
    return num_tokens * (1.0 + context / CONTEXT_TOKENS)


class StepTimes:
    """Computed steps, by size. A `fixed_s` above 0 is the limit for every step.

    `token_s` is what each token of a small step took during warm-up: it gives a slow machine time for its first step.
    Tokens of large steps take less.
    """

    def __init__(self, *, fixed_s: float = 0.0, floor_s: float = FLOOR_S, token_s: float = 0.0) -> None:
        self._fixed_s, self._floor_s, self._token_s = fixed_s, floor_s, token_s
        self._classes: defaultdict[int, _SizeClass] = defaultdict(_SizeClass)

    def add(self, num_tokens: int, work: float, step_s: float) -> None:
        """A step of `num_tokens`, of size `work`, took `step_s` seconds."""
        self._classes[int(work).bit_length()].add(num_tokens, step_s)

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
        """Tokens a second of the step size that computes most of them; 0 until a full step was computed."""
        full = (known.tokens_per_s for known in self._classes.values() if known.num_tokens.value >= FULL_TOKENS)
        return max(full, default=0.0)

    def _expected_s(self, key: int) -> float | None:
        """The worst time of a step of this size: that of the next larger known size, or in proportion to a smaller."""
        larger = [size for size in self._classes if size >= key]
        if larger:
            return self._classes[min(larger)].slow_s
        if not self._classes:
            return None
        size = max(self._classes)
        return float(self._classes[size].slow_s * 2 ** (key - size))
