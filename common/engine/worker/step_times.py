"""Time limit after which an engine step counts as stuck, derived from recent steps. Pure.

The expected duration is the prediction of the worker's `StepModel`, plus the largest recent excess over a prediction.
Before the model has seen a kind of step, such as prompts on a worker that has only decoded, a step is expected to take
as long as the slowest step so far, scaled by its work if it is larger. A worker detects a hang within seconds once it
has computed a few steps. Slow machines get proportionally longer limits.
"""

from __future__ import annotations

from common.latency import StepModel, StepShape
from common.observe import Ewma

# Limits: in seconds, or as a multiple of the expected duration.
FACTOR = 20.0
"""Multiple for short steps: machines are shared, and swap."""
LEAST_FACTOR = 3.0
"""Minimum multiple, for steps of any expected duration."""
FLOOR_S = 3.0
"""Minimum on a CPU: a swapped-out page or another process may delay any step by that much."""
DEVICE_FLOOR_S = 20.0
"""Minimum on a GPU: the first launch of a kernel variant compiles it, during any step."""
LONGEST_S = 60.0
"""Limit of the first step, and of every step unless its expected duration is close to it."""

CONTEXT_TOKENS = 2048
"""Until the cost of attention is known, a token with this many preceding tokens counts as two."""
SMOOTHING = 0.2
"""Weight of the latest step in the averages, which cover about five steps."""
FORGETTING = 0.02
"""Decay per step of the difference to the slowest step."""


class StepRate:
    """Average duration and token rate of recent steps, for heartbeats and metrics."""

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


def work_of(shape: StepShape) -> float:
    """Return the size of a step: its tokens, weighted by their context."""
    return shape.num_tokens + shape.num_rows + (shape.num_pairs / 2 + shape.context) / CONTEXT_TOKENS


class StepTimes:
    """Durations of computed steps. If `fixed_s` is above 0, it is the limit for every step.

    `token_s`: time per token of a small step during warm-up, which extends the first limit on a slow machine. Larger
    steps take less time per token.
    """

    def __init__(self, *, fixed_s: float = 0.0, floor_s: float = FLOOR_S, token_s: float = 0.0) -> None:
        self._fixed_s, self._floor_s, self._token_s = fixed_s, floor_s, token_s
        self._slowest_s = self._most_work = 0.0
        self._excess_s = 0.0
        self._has_rows = False

    def add(self, shape: StepShape, step_s: float, model: StepModel) -> None:
        """Record a step that took `step_s` seconds."""
        self._has_rows |= shape.num_rows > 0
        if self._is_known(shape, model):
            self._excess_s = _slowest(self._excess_s, step_s - _predicted_s(shape, model))
        self._slowest_s = _slowest(self._slowest_s, step_s)
        self._most_work = max(self._most_work, work_of(shape))

    @property
    def idle_limit_s(self) -> float:
        """Maximum duration of a loop iteration without a step."""
        return self._fixed_s or self._floor_s

    def limit_s(self, shape: StepShape, model: StepModel) -> float:
        """Return the maximum duration of a step before it counts as stuck."""
        if self._fixed_s:
            return self._fixed_s
        if not self._most_work:
            return max(LONGEST_S, LEAST_FACTOR * self._token_s * work_of(shape))
        if self._is_known(shape, model):
            expected_s = _predicted_s(shape, model) + max(0.0, self._excess_s)
        else:
            expected_s = self._slowest_s * max(1.0, work_of(shape) / self._most_work)
        return max(min(LONGEST_S, max(self._floor_s, FACTOR * expected_s)), LEAST_FACTOR * expected_s)

    def _is_known(self, shape: StepShape, model: StepModel) -> bool:
        """Return whether the model was fitted to all kinds of work in this step."""
        has_prompts, has_rows = shape.num_tokens > 0, shape.num_rows > 0
        return model.is_known and (model.knows_prompts or not has_prompts) and (self._has_rows or not has_rows)


def _predicted_s(shape: StepShape, model: StepModel) -> float:
    """Return the model's prediction, increased for a long context if the model has not seen one."""
    predicted_s = model.seconds(shape)
    if (shape.num_pairs and not model.pair_s) or (shape.context and not model.context_s):
        predicted_s *= work_of(shape) / (shape.num_tokens + shape.num_rows)
    return predicted_s


def _slowest(known: float, step_s: float) -> float:
    """Update a slowly decaying maximum."""
    return max(step_s, known + FORGETTING * (step_s - known))
