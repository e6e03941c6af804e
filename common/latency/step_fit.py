"""Fits a worker's `StepModel` to its own steps while it serves. Pure.

Steps of similar shape form a kind, whose averages follow the speed of the machine. The model is a non-negative
least-squares fit of the relative error over kinds. A rare kind has the same weight as a frequent one, so the fit stays
valid for long prompts while only short ones arrive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.latency.step_model import LARGEST_COST, StepModel, StepShape
from common.observe import Ewma

MAX_KINDS = 96
"""Maximum number of kinds: enough for all batch sizes by powers of two, with and without a prompt."""
SMOOTHING = 0.1
"""Smoothing factor of the mean time of a kind: about the last ten steps count."""
LARGEST_JUMP = math.log(2.0)
"""Maximum effect of a single step, as a logarithmic ratio to its kind. Slower steps were probably disturbed."""
CONFIDENCE = 8
"""Number of steps after which a kind has full weight."""
HALF_LIFE_STEPS = 4096
"""Number of later steps after which the weight of a kind is halved."""
FEWEST_STEPS, MOST_STEPS = 4, 512
"""Limits of the number of steps before the first fit, and between fits: a quarter of the steps so far. After a step of
a new kind, the next fit follows within the lower limit, so that the first prompt or large batch is not mispredicted for
long."""
ERROR_SMOOTHING = 0.05
"""Smoothing factor of the reported error: about the last twenty steps count."""
PACE_SMOOTHING, PACE_CHANGE = 0.03, 1.2
"""Smoothing factor of the machine's pace, and the ratio of step times, slower or faster, that counts as a change."""
MOST_SHIFT = math.log(4.0)
"""Maximum correction of a kind without new steps by changes of pace, as a logarithm. On a machine of varying pace the
corrections would add up without limit."""
OFF_SMOOTHING, OFF_STEPS = 0.1, 16
"""Smoothing factor of the deviation from predictions, and the minimum number of steps between early fits. A deviation
by a change of pace triggers an early fit, so that a worker that slows down is not judged by an outdated model."""
STEEPEST = 128
"""At this context length in tokens, attention takes at most as long as the other work of a token."""
SHALLOW = 256
"""Minimum mean context, and minimum amount of attention in tokens of a prompt, for steps to determine the cost of
attention. Fits to short prompts, or to the ends of cached ones, would explain noise by the quadratic term and predict
minutes for long prompts."""
RIDGE = (3e-2, 3e-2, 1e-3, 3e-2, 1e-2, 3e-2)
"""Regularisation by column, which makes fits to few kinds unique. Prefers tokens to fixed parts and attention."""
FEW_TOKENS, RIDGE_OF_FEW = 32, (3e-2, 3e-2, 0.3, 3e-2, 1e-2, 3e-2)
"""Regularisation while no step had this many prompt tokens. The time of such steps is that of reading the weights.
Otherwise four prompts of one token would predict seconds for one of 4,000."""
FEW_ROWS, RIDGE_OF_ROWS = 1, 0.3
"""Regularisation of the columns of rows and their context while no step had more rows. The time of such steps is that
of reading the weights. Otherwise a lone sequence would predict twice the time for two, and goals would be predicted to
be missed as soon as a second request comes."""
FLOOR_GAIN = 0.8
"""Maximum ratio of the squared errors with and without a floor for the floor to be used."""
FEWEST_ON_FLOOR, MOST_FLOORS = 2, 8
"""Minimum number of prompt kinds on the floor and above it, and maximum number of floor ends that are tried."""

Floats = NDArray[np.float64]


@dataclass(slots=True)
class _Kind:
    """Averages over steps of similar shape. Times are averaged geometrically to limit the effect of long stalls.

    `last` is the number of the latest step. `shift` is the sum of changes of pace in `log_s` since then.
    """

    values: tuple[float, float, float, float]
    log_s: float
    count: int = 0
    last: int = 0
    shift: float = 0.0

    def add(self, shape: StepShape, step_s: float, number: int) -> None:
        self.count, self.last, self.shift = self.count + 1, number, 0.0
        share = max(SMOOTHING, 1.0 / self.count)
        tokens, pairs, rows, context = self.values
        self.values = (
            tokens + share * (shape.num_tokens - tokens),
            pairs + share * (shape.num_pairs - pairs),
            rows + share * (shape.num_rows - rows),
            context + share * (shape.context - context),
        )
        self.log_s += share * min(math.log(step_s) - self.log_s, LARGEST_JUMP)

    def change_pace(self, log_pace: float) -> None:
        """Correct the time for a machine whose steps take e**log_pace times as long as before."""
        before, self.shift = self.shift, max(-MOST_SHIFT, min(MOST_SHIFT, self.shift + log_pace))
        self.log_s += self.shift - before

    @property
    def step_s(self) -> float:
        return math.exp(self.log_s)


class StepFit:
    """Fits a `StepModel` to observed steps. `model` is the latest fit."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, ...], _Kind] = {}
        self._error = Ewma(ERROR_SMOOTHING)
        self._log_pace = Ewma(PACE_SMOOTHING, start=0.0)
        self._off = Ewma(OFF_SMOOTHING, start=1.0)
        self._num_steps = self._fitted_at = 0
        self._fit_at = FEWEST_STEPS
        self.model = StepModel()

    def observe(self, shape: StepShape, step_s: float) -> None:
        """Record a step of this shape that took `step_s` seconds."""
        if step_s <= 0.0 or not (shape.num_tokens or shape.num_rows):
            return
        if self.model.is_known:
            predicted_s = self.model.seconds(shape)
            self._error.observe(min(1.0, abs(predicted_s - step_s) / step_s))
            self._off.observe(min(2.0, step_s / max(predicted_s, step_s / 2)))
        self._num_steps += 1
        kind = self._kinds.get(key := _key(shape))
        if kind is None:
            if self._make_room():
                self._fit_at = min(self._fit_at, self._num_steps + FEWEST_STEPS - 1)
            kind = self._kinds[key] = _Kind((0.0, 0.0, 0.0, 0.0), math.log(step_s))
        self._keep_pace(math.log(step_s) - kind.log_s)
        kind.add(shape, step_s, self._num_steps)
        if self._num_steps >= self._fit_at or self._is_off:
            self._off, self._fitted_at = Ewma(OFF_SMOOTHING, start=1.0), self._num_steps
            self._fit_at = self._num_steps + min(MOST_STEPS, max(FEWEST_STEPS, self._num_steps // 4))
            self._fit()

    @property
    def _is_off(self) -> bool:
        """Whether the steps since the last fit deviate from predictions."""
        is_early = self._num_steps - self._fitted_at < OFF_STEPS
        return not (is_early or 1.0 / PACE_CHANGE < self._off.value < PACE_CHANGE)

    def _keep_pace(self, log_ratio: float) -> None:
        """Apply a change of the machine's pace to kinds without new steps.

        The mean is of logarithms, like the time of a kind. The mean ratio of times that only fluctuate would exceed 1.
        """
        self._log_pace.observe(max(-LARGEST_JUMP, min(LARGEST_JUMP, log_ratio)))
        if abs(self._log_pace.value) > math.log(PACE_CHANGE):
            for kind in self._kinds.values():
                kind.change_pace(self._log_pace.value)
            self._log_pace = Ewma(PACE_SMOOTHING, start=0.0)

    def _make_room(self) -> bool:
        """Remove the least recently seen kind if the limit is reached. Returns whether there was space."""
        if len(self._kinds) < MAX_KINDS:
            return True
        del self._kinds[min(self._kinds, key=lambda key: self._kinds[key].last)]
        return False

    def _fit(self) -> None:
        kinds = list(self._kinds.values())
        times = np.array([kind.step_s for kind in kinds])
        ages = np.array([self._num_steps - kind.last for kind in kinds])
        trust = np.array([min(kind.count, CONFIDENCE) / CONFIDENCE for kind in kinds]) * 0.5 ** (ages / HALF_LIFE_STEPS)
        coefficients = fit(np.array([kind.values for kind in kinds]), times, trust)
        if not (coefficients <= LARGEST_COST).all():
            return  # an out-of-range value would invalidate every heartbeat, and routers would declare the worker dead
        fixed_s, floor_s, token_s, pair_s, row_s, context_s = map(float, coefficients)
        self.model = StepModel(
            fixed_s=fixed_s,
            floor_s=floor_s,
            token_s=token_s,
            pair_s=pair_s,
            row_s=row_s,
            context_s=context_s,
            error=self._error.value,
            num_steps=self._num_steps,
        )


def fit(values: Floats, times: Floats, trust: Floats) -> Floats:
    """Return coefficients (fixed, floor, token, pair, row, context) for `values` [n, 4] of steps that took `times` [n].

    Tries several numbers of prompt tokens as the end of the floor, and no floor.
    """
    best = _fit_without(values, times, trust, np.zeros(len(times), bool))
    lowest = _loss(best, values, times, trust)
    limit = FLOOR_GAIN * lowest
    sizes = np.unique(values[values[:, 0] > 0, 0])[FEWEST_ON_FLOOR - 1 : -FEWEST_ON_FLOOR]
    for most in sizes[:: -(-len(sizes) // MOST_FLOORS) or 1]:
        found = _fit_without(values, times, trust, values[:, 0] <= most)
        loss = _loss(found, values, times, trust)
        if loss < min(limit, lowest):
            best, lowest = found, loss
    return best


def _fit_without(values: Floats, times: Floats, trust: Floats, on_floor: NDArray[np.bool_]) -> Floats:
    """Fit with no cost of tokens beyond the floor for the steps `on_floor`.

    The attention columns have the steepest possible slope, so non-negative combinations with the others are less steep.
    """
    above = np.where(on_floor, 0.0, 1.0)
    tokens, pairs, rows, context = values.T
    steep, steep_rows = (tokens + pairs / STEEPEST) * above, rows + context / STEEPEST
    steep *= ((pairs > SHALLOW * tokens) & (pairs > SHALLOW**2)).any()
    steep_rows *= (context > SHALLOW * rows).any()
    columns = np.column_stack([np.ones(len(times)), 1.0 - above, tokens * above, steep, rows, steep_rows])
    weights = np.sqrt(trust)
    relative = columns / times[:, None] * weights[:, None]
    ridge = RIDGE if tokens.max() >= FEW_TOKENS else RIDGE_OF_FEW
    if rows.max() <= FEW_ROWS:
        ridge = (*ridge[:4], RIDGE_OF_ROWS, RIDGE_OF_ROWS)
    fixed, floor, token, pair, row, seen = _non_negative(relative, weights, np.abs(relative).max(axis=0), ridge)
    return np.array([fixed, floor, token + pair, pair / STEEPEST, row + seen, seen / STEEPEST])


def _non_negative(matrix: Floats, target: Floats, scales: Floats, ridges: Sequence[float]) -> Floats:
    """Solve least squares with non-negative coefficients by removing the most negative one repeatedly."""
    active = [index for index, scale in enumerate(scales) if scale > 0]
    solution = np.zeros(len(scales))
    while active:
        used = scales[active]
        ridge = np.diag([ridges[index] for index in active])
        system = np.vstack([matrix[:, active] / used, ridge])
        found = np.linalg.lstsq(system, np.concatenate([target, np.zeros(len(active))]), rcond=None)[0]
        worst = int(np.argmin(found))
        if found[worst] >= 0.0:
            solution[active] = found / used
            break
        del active[worst]
    return solution


def _loss(coefficients: Floats, values: Floats, times: Floats, trust: Floats) -> float:
    fixed_s, floor_s, token_s, pair_s, row_s, context_s = coefficients
    prompt_s = np.maximum(floor_s, token_s * values[:, 0] + pair_s * values[:, 1])
    predicted = fixed_s + prompt_s + row_s * values[:, 2] + context_s * values[:, 3]
    return float((trust * ((predicted - times) / times) ** 2).sum())


def _key(shape: StepShape) -> tuple[int, ...]:
    """Return the kind of a shape: the bit lengths of its numbers."""
    depth = shape.num_pairs // max(1, shape.num_tokens)
    numbers = (shape.num_tokens, depth // 256, shape.num_rows, shape.context // 256)
    return tuple(number.bit_length() for number in numbers)
