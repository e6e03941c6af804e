"""Fits a worker's `StepModel` to its own steps while it serves. Pure.

Steps of about one shape form a kind, whose averages follow the machine. The model is the non-negative least-squares
fit, in relative error, to the kinds: a rare kind counts as much as a frequent one, so the fit keeps what it knows of
long prompts while only short ones come.
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
"""Kinds of steps that are remembered: enough for every size of a batch by powers of two, with and without a prompt."""
SMOOTHING = 0.1
"""The share of one more step in the mean time of its kind: ten or so steps count."""
LARGEST_JUMP = math.log(2.0)
"""A step that takes more times as long as its kind did was held up by something else, unless that goes on."""
CONFIDENCE = 8
"""Steps after which a kind counts in full."""
HALF_LIFE_STEPS = 4096
"""Steps of other kinds after which a kind counts half."""
FEWEST_STEPS, MOST_STEPS = 4, 512
"""Between two fits, and before the first: a quarter of the steps so far, within these bounds. A step of a new kind
brings the next fit within the fewest: the first prompt, or the first large batch, must not be misjudged for long."""
ERROR_SMOOTHING = 0.05
"""The share of one more step in the reported error: that of about twenty steps."""
PACE_SMOOTHING, PACE_CHANGE = 0.03, 1.2
"""A machine whose steps of all kinds take so many times as long as they did, or as short, has changed its pace."""
MOST_SHIFT = math.log(4.0)
"""By how much changes of pace may move the time of a kind that does not come meanwhile: on a machine whose pace goes up
and down they would add up without bound."""
OFF_SMOOTHING, OFF_STEPS = 0.1, 16
"""Steps that differ from their predictions by a change of pace on average bring the next fit, so many steps after the
last one at least: a worker that slows down must not be judged by its former model until the next fit is due."""
STEEPEST = 128
"""At so many tokens of context attention takes at most as long as all else that a token takes."""
SHALLOW = 256
"""Steps whose tokens see fewer tokens on average, or that have less attention than a prompt of so many tokens, say
nothing of it: fits to short prompts, or to the ends of cached ones, would explain noise by its square, and predict that
long prompts take minutes."""
RIDGE = (3e-2, 3e-2, 1e-3, 3e-2, 1e-2, 3e-2)
"""What makes a fit to few kinds definite, for each column: tokens rather than fixed parts or attention explain it."""
FEW_TOKENS, RIDGE_OF_FEW = 32, (3e-2, 3e-2, 0.3, 3e-2, 1e-2, 3e-2)
"""The same while no step had so many prompt tokens: such steps take what reading the weights takes, whatever they
compute. Otherwise four prompts of one token would make one of 4,000 look like seconds."""
FLOOR_GAIN = 0.8
"""A floor must lower the squared error to this share to be believed."""
FEWEST_ON_FLOOR, MOST_FLOORS = 2, 8
"""Kinds of prompt steps that must lie on a floor, and as many above it; how many ends of it are tried."""

Floats = NDArray[np.float64]


@dataclass(slots=True)
class _Kind:
    """Averages over steps of about one shape, of times the geometric one: one long stall must not count for hundreds.

    `last`: the number of the latest step; `shift`: what changes of pace have added to `log_s` since then.
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
        """The machine's steps take e**log_pace times as long as before."""
        before, self.shift = self.shift, max(-MOST_SHIFT, min(MOST_SHIFT, self.shift + log_pace))
        self.log_s += self.shift - before

    @property
    def step_s(self) -> float:
        return math.exp(self.log_s)


class StepFit:
    """Observes steps; `model` is the latest fit."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, ...], _Kind] = {}
        self._error = Ewma(ERROR_SMOOTHING)
        self._log_pace = Ewma(PACE_SMOOTHING, start=0.0)
        self._off = Ewma(OFF_SMOOTHING, start=1.0)
        self._num_steps = self._fitted_at = 0
        self._fit_at = FEWEST_STEPS
        self.model = StepModel()

    def observe(self, shape: StepShape, step_s: float) -> None:
        """A step of this shape took `step_s` seconds."""
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
        """Whether the steps since the last fit take longer than predicted, or not as long."""
        is_early = self._num_steps - self._fitted_at < OFF_STEPS
        return not (is_early or 1.0 / PACE_CHANGE < self._off.value < PACE_CHANGE)

    def _keep_pace(self, log_ratio: float) -> None:
        """When the machine has become slower or faster, the kinds that do not come have, too.

        The mean is of logarithms, as a kind's time is: the mean ratio of times that only vary is above 1.
        """
        self._log_pace.observe(max(-LARGEST_JUMP, min(LARGEST_JUMP, log_ratio)))
        if abs(self._log_pace.value) > math.log(PACE_CHANGE):
            for kind in self._kinds.values():
                kind.change_pace(self._log_pace.value)
            self._log_pace = Ewma(PACE_SMOOTHING, start=0.0)

    def _make_room(self) -> bool:
        """Forget the kind that was not seen for longest, if there are too many; whether there was room."""
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
            return  # routers would drop each heartbeat with such a model, and take the worker for dead
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
    """Coefficients (fixed, floor, token, pair, row, context) for `values` [n, 4] of steps that took `times` [n].

    Tries numbers of prompt tokens as the end of the floor, and no floor.
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
    """The fit in which the steps `on_floor` take no time for their tokens beyond the floor.

    Its columns for attention are the steepest that there can be, so sums of them with non-negative weights are less.
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
    fixed, floor, token, pair, row, seen = _non_negative(relative, weights, np.abs(relative).max(axis=0), ridge)
    return np.array([fixed, floor, token + pair, pair / STEEPEST, row + seen, seen / STEEPEST])


def _non_negative(matrix: Floats, target: Floats, scales: Floats, ridges: Sequence[float]) -> Floats:
    """Least squares without negative coefficients: the most negative one leaves until none is."""
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
    """Shapes whose numbers have equally many bits are of one kind."""
    depth = shape.num_pairs // max(1, shape.num_tokens)
    numbers = (shape.num_tokens, depth // 256, shape.num_rows, shape.context // 256)
    return tuple(number.bit_length() for number in numbers)
