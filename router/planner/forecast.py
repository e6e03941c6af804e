"""What a pool of so many workers would give its requests: times of tokens, at a quantile. Pure.

The router's own forecast (`router/policy/forecast.py`) predicts one request on one worker as it is now; this one
predicts all requests on a pool that there may be.
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
"""Share of a worker's KV blocks, and of its time, that a pool is planned to use: the rest is for the unforeseen."""
NO_ROWS = StepShape()
CACHED = 32
"""Results that are kept: one plan asks for the same times again and again."""
MOST_ERROR = 0.5
"""A model's error counts up to this; predictions are longer by so much."""


def alone_s(kind: WorkerKind, request: SampledRequest, beside: StepShape = NO_ROWS) -> float:
    """The time of a prompt on a worker that computes no other; `beside` are rows in each of its steps."""
    return kind.model.steps_s(request.prompt, kind.step_tokens, beside)


def packed_s(kind: WorkerKind, request: SampledRequest) -> float:
    """A prompt's share of steps that are full of prompts like it."""
    model, prompt = kind.model, request.prompt
    num_steps = prompt.num_tokens / max(1, kind.step_tokens)
    computed_s = model.token_s * prompt.num_tokens + model.pair_s * prompt.num_pairs
    return num_steps * model.fixed_s + max(num_steps * model.floor_s, computed_s)


@functools.lru_cache(maxsize=CACHED)
def _alone_s(requests: tuple[SampledRequest, ...], kind: WorkerKind, beside: StepShape) -> tuple[float, ...]:
    """Of each request, with the model's error."""
    return tuple(careful(kind) * alone_s(kind, request, beside) for request in requests)


@functools.lru_cache(maxsize=CACHED)
def _packed_s(requests: tuple[SampledRequest, ...], kind: WorkerKind) -> tuple[float, ...]:
    """Of each request, with the model's error."""
    return tuple(careful(kind) * packed_s(kind, request) for request in requests)


def careful(kind: WorkerKind) -> float:
    """Times are predicted this many times longer, because the model errs."""
    return 1.0 + min(MOST_ERROR, kind.model.error)


@dataclass(frozen=True, slots=True)
class PromptForecast:
    """The wait for a worker, and `own_s`, equally likely times of prompts alone. The pool computes for the share
    `used` of its time."""

    queue: QueueWait = QueueWait(0.0, 0.0)
    own_s: tuple[float, ...] = ()
    used: float = 0.0

    def ttft_s(self, quantile: float) -> float:
        """The time that the share `quantile` of first tokens does not exceed."""
        return response_quantile(self.queue, self.own_s, quantile)

    def late(self, goal_s: float) -> float:
        """The share of first tokens that take longer."""
        return late(self.queue, self.own_s, goal_s)

    def best_s(self, quantile: float) -> float:
        """The same as `ttft_s` without any wait: no number of workers makes it shorter."""
        return response_quantile(QueueWait(0.0, 0.0), self.own_s, quantile)


def of_prompts(load: OfferedLoad, kind: WorkerKind, num_workers: int, beside: StepShape = NO_ROWS) -> PromptForecast:
    """The pool as one queue, because the router sends each prompt where it waits least.

    Waiting prompts share steps: the busier the pool, the more of them. The service time lies between that of a lone
    prompt and its share of a full step, at the pool's own utilisation u: u = a / (1 + a - p), where a and p are the
    utilisations by either.
    """
    if not load.requests or load.rate <= 0.0:
        return PromptForecast()
    alone = _alone_s(load.requests, kind, beside)
    if num_workers <= 0:
        return PromptForecast(NO_LIMIT, alone, math.inf)
    packed = [min(a, p) for a, p in zip(alone, _packed_s(load.requests, kind), strict=True)]
    by_alone, by_packed = (load.rate * sum(each) / len(each) / num_workers for each in (alone, packed))
    used = by_alone / (1.0 + by_alone - by_packed)
    service = [p + (a - p) * (1.0 - used) for a, p in zip(alone, packed, strict=True)]
    return PromptForecast(wait(num_workers, load.rate, service, load.burstiness), alone, by_packed)


@dataclass(frozen=True, slots=True)
class DecodeForecast:
    """At the quantile: rows of a worker, the time of a token, KV blocks as a share of those there are.

    `lone_s`: the time of a token in a batch of one, which no number of workers shortens. `used` is the share of the
    worker's time at which its batch would grow without limit, 1. `prompts` are those that decode workers compute.
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
    """All requests of `load` decode here, and the prompts of `local` are computed here.

    Little's law: rows are the rate times tokens of an answer times the time of a token, which grows with the rows.
    `least_rows` requests have places in any case, because they are there now.
    """
    if not load.requests or (load.rate <= 0.0 and least_rows <= 0.0):
        return DecodeForecast()
    model, factor = kind.model, careful(kind)
    num_output, tokens, _ = _context(load.requests)
    _, kept, squares = _context(load.requests, kind.window)
    lone_s = factor * model.seconds(StepShape.of_rows(1, round(tokens)))
    if num_workers <= 0:
        return DecodeForecast(math.inf, math.inf, lone_s, math.inf, math.inf)
    fixed_s = factor * (model.fixed_s + model.floor_s)
    row_s = factor * (model.row_s + model.context_s * tokens)
    prompt_s = sum(_packed_s(local.requests, kind)) / max(1, len(local.requests))
    share_left = 1.0 - local.rate * prompt_s / num_workers  # of a worker's time, beside prompts
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
    beside = StepShape.of_rows(math.ceil(rows), round(rows * tokens))
    return DecodeForecast(
        num_rows=most_rows,
        tpot_s=(fixed_s + row_s * most_rows) / share_left,
        lone_s=lone_s,
        blocks=most_blocks / max(1, kind.num_blocks),
        used=used + 1.0 - share_left,
        prompts=of_prompts(local, kind, num_workers, beside),
    )


@functools.lru_cache(maxsize=CACHED)
def _context(requests: tuple[SampledRequest, ...], most: int = 0) -> tuple[float, float, float]:
    """Mean tokens of an answer; mean and mean square of a running sequence's tokens: long answers run for longer.

    `most` bounds the tokens of each sequence; 0: nothing does.
    """
    weight = mean = square = 0.0
    for one in requests:
        num_output = max(1, one.num_output)
        tokens = min(one.num_prompt + num_output / 2, most or math.inf)
        weight += num_output
        mean += num_output * tokens
        square += num_output * tokens**2
    return weight / len(requests), mean / weight, square / weight
