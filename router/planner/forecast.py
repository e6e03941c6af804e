"""Predicts the token times of a pool of a given size, at a quantile. Pure.

The router's own forecast (`router/policy/forecast.py`) predicts one request on one current worker. This one predicts
all requests on a hypothetical pool.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from common.latency import StepShape
from router.planner.offered_load import OfferedLoad, SampledRequest
from router.planner.pool import WorkerKind
from router.planner.queueing import NO_LIMIT, QueueWait, late, peak, response_quantile, wait

MOST_USED = 0.9
"""Maximum fraction of a worker's KV blocks and time that is planned to be used. The rest is a reserve."""
NO_ROWS = StepShape()
CACHED = 32
"""Size of result caches. One plan needs the same times repeatedly."""
MOST_ERROR = 0.5
"""Maximum relative error of a step model by which predictions are increased."""


def alone_s(kind: WorkerKind, request: SampledRequest, decode_rows: StepShape = NO_ROWS) -> float:
    """Return the time of a prompt on a worker that computes no other. `decode_rows` are decode rows in each step."""
    return kind.model.steps_s(request.prompt, kind.step_tokens, decode_rows)


def packed_s(kind: WorkerKind, request: SampledRequest) -> float:
    """Return a prompt's part of steps that are full of similar prompts, in seconds."""
    model, prompt = kind.model, request.prompt
    num_steps = prompt.num_tokens / max(1, kind.step_tokens)
    computed_s = model.token_s * prompt.num_tokens + model.pair_s * prompt.num_pairs
    return num_steps * model.fixed_s + max(num_steps * model.floor_s, computed_s)


@functools.lru_cache(maxsize=CACHED)
def _alone_s(requests: tuple[SampledRequest, ...], kind: WorkerKind, decode_rows: StepShape) -> tuple[float, ...]:
    """Return the time of each request, increased by the model's error."""
    return tuple(error_margin(kind) * alone_s(kind, request, decode_rows) for request in requests)


@functools.lru_cache(maxsize=CACHED)
def _packed_s(requests: tuple[SampledRequest, ...], kind: WorkerKind) -> tuple[float, ...]:
    """Return the time of each request, increased by the model's error."""
    return tuple(error_margin(kind) * packed_s(kind, request) for request in requests)


def error_margin(kind: WorkerKind) -> float:
    """Return the factor by which predictions are increased because of the model's error."""
    return 1.0 + min(MOST_ERROR, kind.model.error)


@dataclass(frozen=True, slots=True)
class PromptForecast:
    """Predicted wait, and equally likely times `own_s` of the prompts themselves.

    The pool is busy for the fraction `used` of its time.
    """

    queue: QueueWait = QueueWait(0.0, 0.0)
    own_s: tuple[float, ...] = ()
    used: float = 0.0

    def ttft_s(self, quantile: float) -> float:
        """Return the given quantile of the time to first token."""
        return response_quantile(self.queue, self.own_s, quantile)

    def late(self, goal_s: float) -> float:
        """Return the fraction of first tokens that take longer than the goal."""
        return late(self.queue, self.own_s, goal_s)

    def best_s(self, quantile: float) -> float:
        """Return the same quantile without any wait, which no number of workers improves."""
        return response_quantile(QueueWait(0.0, 0.0), self.own_s, quantile)


def of_prompts(
    load: OfferedLoad, kind: WorkerKind, num_workers: int, decode_rows: StepShape = NO_ROWS
) -> PromptForecast:
    """Predict a pool that computes prompts, as a single queue: the router sends each prompt where it waits least.

    Queued prompts share steps, the more the busier the pool is. The service time is between that of a lone prompt and
    its part of a full step, depending on the utilisation u = a / (1 + a - p), where a and p are the utilisations by
    either.
    """
    if not load.requests or load.rate <= 0.0:
        return PromptForecast()
    alone = _alone_s(load.requests, kind, decode_rows)
    if num_workers <= 0:
        return PromptForecast(NO_LIMIT, alone, math.inf)
    packed = [min(a, p) for a, p in zip(alone, _packed_s(load.requests, kind), strict=True)]
    by_alone, by_packed = (load.rate * sum(each) / len(each) / num_workers for each in (alone, packed))
    used = by_alone / (1.0 + by_alone - by_packed)
    service = [p + (a - p) * (1.0 - used) for a, p in zip(alone, packed, strict=True)]
    return PromptForecast(wait(num_workers, load.rate, service, load.burstiness), alone, by_packed)


@dataclass(frozen=True, slots=True)
class DecodeForecast:
    """Predicted load of a decode worker at the quantile: rows, time per token, and used fraction of KV blocks.

    `lone_s` is the time per token in a batch of one, which no number of workers improves. At `used` = 1 the batch would
    grow without limit. `prompts` are those that decode workers compute.
    """

    num_rows: float = 0.0
    tpot_s: float = 0.0
    lone_s: float = 0.0
    blocks: float = 0.0
    used: float = 0.0
    prompts: PromptForecast = PromptForecast()


def of_decode(
    load: OfferedLoad,
    local: OfferedLoad,
    kind: WorkerKind,
    num_workers: int,
    quantile: float,
    least_rows: float = 0.0,
) -> DecodeForecast:
    """Predict a decode pool that decodes all requests of `load` and computes the prompts of `local`.

    By Little's law, the number of rows is the request rate times tokens per answer times time per token, which
    increases with the rows. At least `least_rows` requests must be held, because they are running now.
    """
    if not load.requests or (load.rate <= 0.0 and least_rows <= 0.0):
        return DecodeForecast()
    model, factor = kind.model, error_margin(kind)
    num_output, tokens, _ = _context(load.requests)
    _, kept, squares = _context(load.requests, kind.window)
    lone_s = factor * model.seconds(StepShape.of_rows(1, round(tokens)))
    if num_workers <= 0:
        return DecodeForecast(math.inf, math.inf, lone_s, math.inf, math.inf)
    fixed_s = factor * (model.fixed_s + model.floor_s)
    row_s = factor * (model.row_s + model.context_s * tokens)
    prompt_s = sum(_packed_s(local.requests, kind)) / max(1, len(local.requests))
    share_left = 1.0 - local.rate * prompt_s / num_workers  # fraction of a worker's time without prompts
    busy = load.rate * num_output / num_workers / share_left if share_left > 0.0 else math.inf  # tokens a second
    used = busy * row_s
    rows = busy * fixed_s / (1.0 - used) if used < 1.0 else math.inf
    if math.isinf(rows):
        return DecodeForecast(math.inf, math.inf, lone_s, math.inf, math.inf)
    total, dispersion = rows * num_workers, (1.0 + load.burstiness) / 2
    spread = peak(total, dispersion, quantile) - total
    most_rows = max(1.0, max(total + spread, least_rows) / num_workers)
    mean_blocks = kept / kind.block_size + 0.5
    square_blocks = squares / kind.block_size**2 + mean_blocks
    most_blocks = max(total * mean_blocks + spread * math.sqrt(square_blocks), least_rows * mean_blocks) / num_workers
    decode_rows = StepShape.of_rows(math.ceil(rows), round(rows * tokens))
    return DecodeForecast(
        num_rows=most_rows,
        tpot_s=(fixed_s + row_s * most_rows) / share_left,
        lone_s=lone_s,
        blocks=most_blocks / max(1, kind.num_blocks),
        used=used + 1.0 - share_left,
        prompts=of_prompts(local, kind, num_workers, decode_rows),
    )


@functools.lru_cache(maxsize=CACHED)
def _context(requests: tuple[SampledRequest, ...], most: int = 0) -> tuple[float, float, float]:
    """Return the mean tokens of an answer, and the mean and mean square of a running sequence's tokens.

    Long answers run longer and are weighted accordingly. `most` limits the tokens of each sequence, 0 for no limit.
    """
    weight = mean = square = 0.0
    for one in requests:
        num_output = max(1, one.num_output)
        tokens = min(one.num_prompt + num_output / 2, most or math.inf)
        weight += num_output
        mean += num_output * tokens
        square += num_output * tokens**2
    return weight / len(requests), mean / weight, square / weight
