"""Predicted times of a request on a worker, now and when its KV arrives. Pure.

Routing, local prefill and admission all use these predictions, so they are consistent. The times come from the step
models that workers fit to their own steps (`StepModel`). A worker without completed steps uses the model of another
worker of its role, or `UNKNOWN` in a new pool, whose costs only rank amounts of work.

Order of prompts (`shortest_first_wait_s`): without goals, workers compute the shortest prompt first
(`prompt_ordering.py`), and a step is filled with tokens and not interrupted. Assuming FIFO order would predict three
times the wait of a short prompt in a queue of long ones. With goals, a prompt that passes others uses up their slack,
so all queued prompts count. This sends fewer prompts to workers where they would make others late.

Arrival (`token_s_at`): judging a decode worker by its current load makes the two pools oscillate. Many requests would
be rejected while it is full, and none while their prompts are still being computed (Qin et al., "Mooncake", FAST 2025,
early rejection based on prediction).
"""

from __future__ import annotations

import math

import msgspec

from common.latency import NOTHING, LinkModel, StepModel, StepShape
from common.wire import MAX_PRIORITY
from common.wire.messages import WorkerHeartbeat
from router.fleet import Worker
from router.policy.request_shape import RequestShape


def shortest_first_wait_s(
    all_s: float, own_s: float, shorter_share: float, step_s: float, running_for_s: float
) -> float:
    """Return the seconds that a prompt of `own_s` waits where all queued prompts take `all_s`.

    The fraction `shorter_share` of them is shorter. A step takes `step_s` and has run for `running_for_s`. With
    `step_s` 0, everything is in one step. The step that completes the new prompt is full as long as other prompts can
    fill it, which is part of the wait.
    """
    if step_s <= 0.0 or all_s <= 0.0:
        return max(0.0, all_s)
    running_s = min(all_s, step_s - running_for_s % step_s)
    waiting_s = all_s - running_s
    before_s = waiting_s * shorter_share
    needed_s = before_s + own_s
    filled_s = min(waiting_s + own_s, step_s * math.ceil(needed_s / step_s))
    return running_s + max(needed_s, filled_s) - own_s


UNKNOWN = StepModel(fixed_s=1e-3, token_s=1e-4, row_s=1e-4, context_s=1e-8)
TRANSFER_TOKEN_S = 2e-6
"""KV transfer time per token to a decode worker without a known transfer: 23 KB at 10 GB/s."""
REMOTE_S = 2e-3
"""Latency of messages and wake-ups of a second worker, in seconds."""
SCARCE = 0.05
"""A decode worker with a smaller fraction of available blocks counts as full, whatever its number of sequences."""
UNTRIED_PREFILL_SLOWDOWN = 2.0
"""Assumed prefill slowdown of a decode worker that has not computed a prompt yet, compared with a prefill worker."""
HIDDEN_SHARE = 0.9
"""Maximum fraction of a transfer that overlaps with prefill. The last step's blocks are sent afterwards."""
LEAST_SERVICE_S = 0.1
"""Minimum decode time of an answer while none has ended, in seconds."""
NO_BOUND = 1 << 60
"""Number of blocks without a limit by a window."""


class Forecast(msgspec.Struct, frozen=True, gc=False):
    """Predicted times of a request, in seconds.

    - `wait_s`: earlier prompts. `prompt_s`: its own prompt, including `fetch_s` for blocks from a disk or a peer.
    - `place_s`: until the decode worker's batch has a free slot.
    - `token_s`: each token after the first. `model_token_s` of it comes from the step model (0 if unknown), and
      `stall_s` from preemptions for lack of blocks.
    - `delay_s`: total delay of the sequences that run there.
    - `transfer_s`: KV transfer from another worker, as far as prefill does not hide it (see `combined`).
    - `lag_s`: messages and other latency that step models do not include.
    """

    wait_s: float = 0.0
    prompt_s: float = 0.0
    place_s: float = 0.0
    token_s: float = 0.0
    delay_s: float = 0.0
    is_known: bool = False
    stall_s: float = 0.0
    transfer_s: float = 0.0
    model_token_s: float = 0.0
    fetch_s: float = 0.0
    lag_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.prompt_s + self.lag_s

    @property
    def waits_for_none(self) -> bool:
        """Whether the prompt is known to start immediately, after no other prompt and without fetched blocks."""
        return self.is_known and self.wait_s == self.place_s == self.fetch_s == 0.0


class ForecastInputs(msgspec.Struct, frozen=True, gc=False):
    """Values derived from a worker for forecasts, valid until it reports or gets work.

    `rows` is the decode part of each step, which takes `step_s`. Prompts not yet in the last report take `fresh_s`,
    reported ones `waiting_s`. `is_known`: the step model is the worker's own. A step computes up to `max_step_tokens`
    prompt tokens in `full_s`. A sequence has at most `max_tokens`. Other routers have probably sent prompts of
    `other_routers_s` since the report, and in total there are probably `num_likely` requests. After all sequences have
    grown, `num_spare_blocks` are left.
    """

    model: StepModel
    is_known: bool
    max_step_tokens: int
    full_s: float
    rows: StepShape
    step_s: float
    fresh_s: float
    num_requests: int
    num_places: int
    num_spare_blocks: int
    knows_prompts: bool
    waiting_s: float
    block_size: int
    max_tokens: int
    most_blocks: int
    other_routers_s: float
    num_likely: int
    link: LinkModel
    disk: LinkModel
    peer: LinkModel


def forecast_inputs(worker: Worker) -> ForecastInputs:
    """Return the worker's derived values, computed once between two of its changes."""
    inputs = worker.forecast_inputs
    if not isinstance(inputs, ForecastInputs):
        beat, hello, fresh, own = worker.load.beat, worker.hello, worker.bookings.fresh, worker.load.step_model
        num_requests, model, max_step_tokens = worker.load.num_requests, model_of(worker), step_tokens(worker)
        num_likely = num_requests + int(worker.estimates.other_routers * fresh.num_requests)  # as in `likely_requests`
        rows = _rows(beat, num_likely)
        decode_rows = rows_with_prompts(worker, rows)
        fresh_s = model.steps_s(fresh.prompt, max_step_tokens, decode_rows)
        inputs = worker.forecast_inputs = ForecastInputs(
            model,
            own.is_known,
            max_step_tokens,
            model.seconds(decode_rows + StepShape.of_prompt(0, max_step_tokens)),
            rows,
            model.seconds(rows),
            fresh_s,
            num_requests,
            places_of(worker),
            worker.load.num_spare_blocks,
            own.knows_prompts,
            beat.waiting_s if beat is not None else 0.0,
            hello.block_size if hello is not None else 1,
            worker.max_tokens if hello is not None else 0,
            worker.window.span_blocks(1) if hello is not None and hello.window else NO_BOUND,
            worker.estimates.other_routers * fresh_s,
            num_likely,
            worker.load.likely_link,
            beat.links.disk if beat is not None else LinkModel(),
            beat.links.peer if beat is not None else LinkModel(),
        )
    return inputs


def model_of(worker: Worker) -> StepModel:
    model = worker.load.likely_model
    return model if model.num_steps else UNKNOWN


def likely_requests(worker: Worker) -> int:
    """Return the worker's requests, including those that other routers have probably sent since its report.

    Other routers see the same reports and use the same policy, so they are assumed to have sent their usual number per
    request of this router. Otherwise each router would fill the least loaded worker.
    """
    return worker.load.num_requests + int(worker.estimates.other_routers * worker.bookings.fresh.num_requests)


def rows_of(worker: Worker) -> StepShape:
    """Return the decode part of each step of a decode worker."""
    return _rows(worker.load.beat, likely_requests(worker))


def _rows(beat: WorkerHeartbeat | None, num_requests: int) -> StepShape:
    """Return the decode part of a step for `num_requests` requests, from a report."""
    if beat is None:
        return StepShape(0, 0, num_requests, 0)
    num_rows = num_requests - beat.num_waiting if num_requests > beat.num_waiting else 0
    context = beat.num_context_tokens
    if beat.num_running:  # assume that requests in transit are as long as running ones
        context = context * num_rows // beat.num_running
    return StepShape(0, 0, num_rows, context)


def rows_with_prompts(worker: Worker, rows: StepShape) -> StepShape:
    """Return `rows` on a decode worker, none on a prefill worker, which does not decode."""
    return rows if worker.role == "decode" else NOTHING


def step_tokens(worker: Worker) -> int:
    """Return the maximum number of prompt tokens per step, as reported by the worker."""
    beat, hello = worker.load.beat, worker.hello
    now = beat.step_tokens if beat is not None else 0
    return now or (hello.max_step_tokens if hello is not None else 0) or 512


def queued_s(worker: Worker, now: float, priority: int = -MAX_PRIORITY) -> float:
    """Return the predicted seconds until the worker has computed its prompts of at least `priority`."""
    inputs = forecast_inputs(worker)
    left_s = inputs.waiting_s - max(0.0, now - worker.load.beat_at) if inputs.waiting_s else 0.0
    fresh_s = inputs.fresh_s
    if fresh_s and left_s <= 0.0:  # they have started: subtract the time since then
        fresh_s -= max(0.0, now - max(worker.bookings.fresh_since, worker.load.beat_at + inputs.waiting_s))
    all_s = max(0.0, fresh_s) + max(0.0, left_s)
    lower, _ = worker.bookings.total.below(priority)
    if not lower.num_tokens:
        return all_s
    return max(0.0, all_s - inputs.model.steps_s(lower, inputs.max_step_tokens, rows_with_prompts(worker, inputs.rows)))


def wait_s(worker: Worker, now: float, priority: int = -MAX_PRIORITY) -> float:
    """Return `queued_s`, corrected by the recent lateness of first tokens and by observed waits."""
    observed_s = worker.estimates.observed_from.get(priority, worker.estimates.observed_s)
    return max(queued_s(worker, now, priority) * worker.estimates.slowness, observed_s)


def before_s(worker: Worker, shape: RequestShape, own_s: float, now: float) -> float:
    """Return the wait of a prompt of `own_s` at the worker, where without goals shorter prompts pass longer ones."""
    all_s = wait_s(worker, now, shape.priority)
    if all_s <= 0.0:
        return 0.0
    inputs = forecast_inputs(worker)
    if shape.ttft_s > 0.0 or worker.bookings.total.num_tokens <= inputs.max_step_tokens:
        return all_s
    shorter_share = worker.bookings.sizes.shorter_share(shape.uncached(worker))
    return shortest_first_wait_s(all_s, own_s, shorter_share, inputs.full_s, now - worker.bookings.turned_at)


def place_s(
    worker: Worker, least_s: float = 0.0, num_after: int = 0, priority: int = -MAX_PRIORITY, num_more: int = 0
) -> float:
    """Return the seconds until the worker's batch has a free slot, by Little's law over the requests before it.

    A request takes at least `least_s` there. The last `num_after` of the worker's requests are ignored, and `num_more`
    are added before it. Requests of lower priority are passed in proportion to their share, but at least one slot must
    become free.
    """
    inputs = forecast_inputs(worker)
    num_before = inputs.num_requests - num_after + 1 - inputs.num_places
    if num_before > 1 and (num_lower := worker.bookings.total.below(priority)[1]):
        num_before = max(1, num_before - num_before * num_lower // worker.bookings.total.num_requests)
    num_before += num_more
    if num_before <= 0:
        return 0.0
    return num_before * max(worker.estimates.service_s.value, worker.estimates.lasting_s, least_s) / inputs.num_places


def places_of(worker: Worker) -> int:
    """Return the number of batch slots of a worker; while blocks are scarce, the number of used ones."""
    beat, hello = worker.load.beat, worker.hello
    if beat is None or hello is None:
        return 1
    if beat.num_waiting and worker.load.num_available_blocks < SCARCE * hello.num_blocks:
        return max(1, beat.num_running + beat.num_transferring)
    return beat.batch_cap or hello.max_num_seqs or 1


def forecast_prefill(worker: Worker, shape: RequestShape, now: float) -> Forecast:
    """Predict a prompt on a prefill worker, which samples the first token."""
    inputs = forecast_inputs(worker)
    fetch_s = shape.fetch_s(worker)
    own_s = inputs.model.steps_s(shape.prompt(worker), inputs.max_step_tokens) + fetch_s
    waits_s = before_s(worker, shape, own_s, now) + shape.held_s
    return Forecast(waits_s, own_s, is_known=inputs.knows_prompts, fetch_s=fetch_s, lag_s=worker.estimates.lag_s)


def forecast_decode(worker: Worker, shape: RequestShape) -> Forecast:
    """Predict an answer on a decode worker, whose prompt a prefill worker computes."""
    inputs = forecast_inputs(worker)
    model = inputs.model
    num_expected, num_rows = shape.num_expected, inputs.rows.num_rows
    own_s = model.row_s + model.context_s * (shape.num_tokens + num_expected // 2)  # one more row in each step
    delay_s = num_rows * num_expected * own_s
    step_s = inputs.step_s + own_s
    token_s, stall_s = step_s * worker.estimates.token_pace, 0.0
    has_place = inputs.num_requests < inputs.num_places  # fast path without `place_s`: called at each heartbeat
    batch_s = 0.0 if has_place else place_s(worker, num_expected * token_s, priority=shape.priority)
    uncached = shape.uncached(worker)
    if num_blocks := num_lacking_blocks(inputs, uncached + num_expected):
        again_s = num_blocks * inputs.block_size * (model.token_s or model.row_s)
        delay_s += num_rows * again_s
        stall_s = (again_s + room_s(worker, num_blocks)) / max(1, num_expected)
    arrival_s = transfer_s(inputs, uncached)
    return Forecast(
        *(
            0.0,
            0.0,
            batch_s,
            token_s + stall_s,
            delay_s,
            inputs.is_known,
            stall_s,
            arrival_s,
            0.0 if stall_s else step_s,
        )
    )


def num_lacking_blocks(inputs: ForecastInputs, num_tokens: int) -> int:
    """Return how many blocks a decode worker will lack after adding `num_tokens` tokens and growing all sequences."""
    spare = inputs.num_spare_blocks
    lacking = num_held_blocks(inputs, num_tokens) - (spare if spare > 0 else 0)
    return lacking if lacking > 0 else 0


def num_held_blocks(inputs: ForecastInputs, num_tokens: int) -> int:
    """Return the number of blocks that a decode worker receives and keeps for `num_tokens` tokens."""
    num_blocks = -(-num_tokens // inputs.block_size)
    return num_blocks if num_blocks < inputs.most_blocks else inputs.most_blocks


def room_s(worker: Worker, num_blocks: int) -> float:
    """Return the seconds until a decode worker has freed `num_blocks` blocks, by Little's law over its answers.

    The youngest answer is preempted and waits for them.
    """
    booked = worker.bookings.total
    if not booked.num_requests:
        return 0.0
    freed_a_s = (booked.num_blocks + booked.num_more) / max(
        worker.estimates.service_s.value, worker.estimates.lasting_s, LEAST_SERVICE_S
    )
    return num_blocks / max(1.0, freed_a_s)


def forecast_local(
    worker: Worker, shape: RequestShape, remote: Forecast, now: float, like: Worker | None = None
) -> Forecast:
    """Predict an answer on a decode worker that also computes the prompt.

    `remote` is the prediction without the prompt.

    A worker that has not computed a prompt yet is assumed to be `UNTRIED_PREFILL_SLOWDOWN` times slower at it than the
    worker `like`.
    """
    inputs = forecast_inputs(worker)
    prompt, model, is_known = shape.prompt(worker), inputs.model, inputs.knows_prompts
    if like is not None and not is_known and inputs.is_known:
        other = forecast_inputs(like)
        is_known = other.knows_prompts
        model = msgspec.structs.replace(
            model,
            token_s=UNTRIED_PREFILL_SLOWDOWN * other.model.token_s,
            pair_s=UNTRIED_PREFILL_SLOWDOWN * other.model.pair_s,
        )
    prompt_s = model.steps_s(prompt, inputs.max_step_tokens, inputs.rows)
    num_steps = -(-prompt.num_tokens // inputs.max_step_tokens)
    stopped_s = inputs.rows.num_rows * max(0.0, prompt_s - num_steps * inputs.step_s)
    delay_s = remote.delay_s + stopped_s
    fetch_s = shape.fetch_s(worker)
    prompt_s += fetch_s
    waits_s = before_s(worker, shape, prompt_s, now)
    return Forecast(
        *(waits_s, prompt_s, remote.place_s, remote.token_s, delay_s, is_known, remote.stall_s),
        model_token_s=remote.model_token_s,
        fetch_s=fetch_s,
        lag_s=worker.estimates.lag_s,
    )


def chunk_s(worker: Worker, shape: RequestShape) -> float:
    """Return the time of a decode worker's step with a usual chunk of the prompt; 0 if it runs no sequence."""
    inputs = forecast_inputs(worker)
    if not inputs.rows.num_rows:
        return 0.0
    start = shape.hits.get(worker.address, 0)
    chunk = StepShape.of_prompt(start, start + min(inputs.max_step_tokens, shape.uncached(worker)))
    return inputs.model.seconds(inputs.rows + chunk)


def transfer_s(inputs: ForecastInputs, num_tokens: int) -> float:
    """Return the KV transfer time of `num_tokens` tokens to a decode worker after all of it is computed, in seconds."""
    if inputs.link.num_transfers:
        return REMOTE_S + inputs.link.seconds(num_held_blocks(inputs, num_tokens))
    return REMOTE_S + TRANSFER_TOKEN_S * min(num_tokens, inputs.most_blocks * inputs.block_size)


def hidden_s(prompt_s: float, arrival_s: float) -> float:
    """Return the part of a transfer that overlaps with the computation of the prompt, in seconds.

    The last step's blocks, a tenth of the transfer, are sent afterwards.
    """
    return min(prompt_s, HIDDEN_SHARE * max(0.0, arrival_s - REMOTE_S))


def combined(first: Forecast, then: Forecast) -> Forecast:
    """Combine a prompt on a prefill worker with its answer on a decode worker."""
    return msgspec.structs.replace(
        then,
        wait_s=first.wait_s,
        prompt_s=first.prompt_s,
        transfer_s=then.transfer_s - hidden_s(first.prompt_s, then.transfer_s),
        is_known=first.is_known and then.is_known,
        fetch_s=first.fetch_s,
        lag_s=first.lag_s,
    )


def rows_at(worker: Worker, after_s: float, num_prompt_tokens: int) -> StepShape:
    """Predict the decode part of a step in `after_s` seconds: remaining sequences and new arrivals.

    The remaining time of a sequence is assumed to be independent of its age, so sequences end at a constant rate.
    Unknown sequences count as `num_prompt_tokens` tokens.
    """
    beat = worker.load.beat
    num_running = min(beat.num_running, worker.load.num_requests) if beat is not None else 0
    num_coming = worker.load.num_requests - num_running
    span_s = max(worker.estimates.service_s.value, worker.estimates.lasting_s)
    num_left = num_running * math.exp(-after_s / span_s) if span_s > 0 else float(num_running)
    num_rows = min(places_of(worker), round(num_left + num_coming))
    each = beat.num_context_tokens / beat.num_running if beat is not None and beat.num_running else num_prompt_tokens
    return StepShape.of_rows(num_rows, round(num_rows * each))


def token_s_at(worker: Worker, after_s: float, num_tokens: int) -> tuple[float, float]:
    """Return the time per token of a new answer when its prompt of `num_tokens` tokens arrives, and if it ran alone.

    0 for a worker without completed steps.
    """
    if not worker.load.step_model.is_known:
        return 0.0, 0.0
    model, own = model_of(worker), StepShape.of_rows(1, num_tokens)
    return model.seconds(rows_at(worker, after_s, num_tokens) + own), model.seconds(own)
