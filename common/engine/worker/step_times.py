"""From when on a step of an engine must be stuck, and how long its recent steps took. Pure.

The time of a step is what the worker's `StepModel` predicts, and as much more as its slowest recent step took than was
predicted. Before the model knows steps of a kind, such as prompts on a worker that has only decoded, they take as long
as the slowest step so far, and in proportion to its work if they are larger. A worker that has computed a few steps
sees within seconds that one hangs; a slow machine, whose steps are long, waits longer accordingly.
"""

from __future__ import annotations

from common.latency import StepModel, StepShape
from common.observe import Ewma

# When a step is stuck, in seconds or as a multiple of what it should take.
FACTOR = 20.0
"""Machines are shared, and swap."""
LEAST_FACTOR = 3.0
"""However long a step should take."""
FLOOR_S = 3.0
"""On a CPU a swapped-out page or another process may cost so much in any step."""
DEVICE_FLOOR_S = 20.0
"""On a GPU the first launch of a kernel variant compiles it, in the middle of any step."""
LONGEST_S = 60.0
"""For the first step, and for every step unless it should take nearly as long."""

CONTEXT_TOKENS = 2048
"""While nothing is known of attention, a token with this many tokens before it counts as two."""
SMOOTHING = 0.2
"""The share of one more step in the mean time and the mean rate: those of about five steps."""
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


def work_of(shape: StepShape) -> float:
    """The size of a step: its tokens, weighted by their context."""
    return shape.num_tokens + shape.num_rows + (shape.num_pairs / 2 + shape.context) / CONTEXT_TOKENS


class StepTimes:
    """Computed steps. A `fixed_s` above 0 is the limit for every step.

    `token_s` is what each token of a small step took during warm-up: it gives a slow machine time for its first step.
    Tokens of large steps take less.
    """

    def __init__(self, *, fixed_s: float = 0.0, floor_s: float = FLOOR_S, token_s: float = 0.0) -> None:
        self._fixed_s, self._floor_s, self._token_s = fixed_s, floor_s, token_s
        self._slowest_s = self._most_work = 0.0
        self._excess_s = 0.0
        self._has_rows = False

    def add(self, shape: StepShape, step_s: float, model: StepModel) -> None:
        """A step took `step_s` seconds."""
        self._has_rows |= shape.num_rows > 0
        if self._is_known(shape, model):
            self._excess_s = _slowest(self._excess_s, step_s - _predicted_s(shape, model))
        self._slowest_s = _slowest(self._slowest_s, step_s)
        self._most_work = max(self._most_work, work_of(shape))

    @property
    def idle_limit_s(self) -> float:
        """How long a turn without a step may take."""
        return self._fixed_s or self._floor_s

    def limit_s(self, shape: StepShape, model: StepModel) -> float:
        """How long a step may take before it must be stuck."""
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
        """Whether the model was fitted to steps of all kinds that are in this one."""
        has_prompts, has_rows = shape.num_tokens > 0, shape.num_rows > 0
        return model.is_known and (model.knows_prompts or not has_prompts) and (self._has_rows or not has_rows)


def _predicted_s(shape: StepShape, model: StepModel) -> float:
    """What the model predicts, and more for a long context while it has seen none."""
    predicted_s = model.seconds(shape)
    if (shape.num_pairs and not model.pair_s) or (shape.context and not model.context_s):
        predicted_s *= work_of(shape) / (shape.num_tokens + shape.num_rows)
    return predicted_s


def _slowest(known: float, step_s: float) -> float:
    """The slowest, which is forgotten slowly."""
    return max(step_s, known + FORGETTING * (step_s - known))
