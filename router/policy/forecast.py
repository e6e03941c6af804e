"""Predicted times of a request at a place, now and when its KV arrives, term by term. Pure.

Routing, local prefill and admission all ask here, so they cannot contradict each other. The times come from the models
that workers fit to their own steps (`StepModel`). A worker that has computed nothing yet is taken for one like others
of its pool; in a new pool for `UNKNOWN`, whose costs only tell more work from less.

Order of prompts (`turn_s`): without goals workers compute the shortest prompt first (`prompt_ordering.py`), and a step
takes as many tokens as it can hold and is not stopped. First come, first served would predict three times the wait of a
short prompt in a queue of long ones. With goals a prompt that passes takes from the slack of the others, so there all
of them count: fewer prompts go to a side on which they would make others late.

Arrival (`token_s_at`): to judge a decode worker by its present load makes two pools oscillate. Many requests are
refused while it is full, and none while their prompts are still being computed (Qin et al., "Mooncake", FAST 2025,
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


def turn_s(all_s: float, own_s: float, shorter_share: float, step_s: float, running_for_s: float) -> float:
    """Seconds that a prompt of `own_s` waits where all that are there take `all_s`, of which shorter ones a share.

    A step that takes `step_s` has run for `running_for_s`; 0 for `step_s`: all of them are in one step. The step that
    ends the new prompt is a full one as long as others are left to fill it: that wait counts, too.
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
"""For the KV of a token on its way to a decode worker of which no transfer is known: 23 KB at 10 GB/s."""
REMOTE_S = 2e-3
"""Messages and wake-ups of a second worker."""
SCARCE = 0.05
"""A decode worker with less than this share of its blocks to give is full, whatever its number of sequences."""
STRANGE = 2.0
"""How many times slower than a prefill worker a decode worker may be at prompts, of which it has computed none."""
HIDDEN_SHARE = 0.9
"""Of a transfer, that prefill may hide: the blocks of the last step cross behind it."""
LEAST_SERVICE_S = 0.1
"""How long an answer takes at least, where none has ended yet."""
NO_BOUND = 1 << 60
"""Blocks, where no window bounds them."""


class Forecast(msgspec.Struct, frozen=True, gc=False):
    """Seconds. `wait_s`: prompts that are computed before this one. `prompt_s`: its own. `place_s`: until the decode
    worker's batch has a place. `token_s`: a token after the first, by the worker's model `model_token_s` (0: unknown);
    `stall_s` of it because the worker's blocks will
    not do for all answers, so that it preempts some. `delay_s`: what all sequences that run there lose. `transfer_s`:
    what the KV takes that comes from another worker, of which prefill hides as much as `joined` takes off. `fetch_s` of
    `prompt_s` goes by while blocks come from a disk or a peer. `lag_s`: messages, and
    what else no model of steps knows.
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
        """Whether the prompt is known to be computed at once: behind no other, and without blocks from elsewhere."""
        return self.is_known and self.wait_s == self.place_s == self.fetch_s == 0.0


class Terms(msgspec.Struct, frozen=True, gc=False):
    """What forecasts need of a worker and no request changes, until the worker reports or gets work.

    `rows` is what each step of a decode worker computes beside prompts, in `step_s` seconds. Prompts that the last
    report does not count yet take `fresh_s`, those that it counted `waiting_s`. `is_known`: the model is the worker's
    own. A step computes at most `max_step_tokens` prompt tokens, in `full_s` seconds; a sequence has at most
    `max_tokens`. Since the report
    other routers are likely to have sent prompts of `rivals_s`, and so many requests that there are `num_likely`. When
    all sequences there have grown, a new one finds `num_spare_blocks`.
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
    rivals_s: float
    num_likely: int
    link: LinkModel
    disk: LinkModel
    peer: LinkModel


def terms_of(worker: Worker) -> Terms:
    """The worker's terms, computed once between two of its changes."""
    terms = worker.terms
    if not isinstance(terms, Terms):
        beat, hello, fresh, own = worker.load.beat, worker.hello, worker.bookings.fresh, worker.load.step_model
        num_requests, model, max_step_tokens = worker.load.num_requests, model_of(worker), step_tokens(worker)
        num_likely = num_requests + int(worker.estimates.rivals * fresh.num_requests)  # see `likely_requests`
        rows = _rows(beat, num_likely)
        beside = rows_beside(worker, rows)
        fresh_s = model.steps_s(fresh.prompt, max_step_tokens, beside)
        terms = worker.terms = Terms(
            model,
            own.is_known,
            max_step_tokens,
            model.seconds(beside + StepShape.of_prompt(0, max_step_tokens)),
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
            worker.estimates.rivals * fresh_s,
            num_likely,
            worker.load.likely_link,
            beat.links.disk if beat is not None else LinkModel(),
            beat.links.peer if beat is not None else LinkModel(),
        )
    return terms


def model_of(worker: Worker) -> StepModel:
    model = worker.load.likely_model
    return model if model.num_steps else UNKNOWN


def likely_requests(worker: Worker) -> int:
    """The worker's requests, with those that other routers are likely to have sent there since it reported.

    They heard the same reports and choose by the same rule, so for each of this router's they sent as many as usual.
    Without that each would fill the emptiest worker by itself.
    """
    return worker.load.num_requests + int(worker.estimates.rivals * worker.bookings.fresh.num_requests)


def rows_of(worker: Worker) -> StepShape:
    """What each step of a decode worker computes beside prompts."""
    return _rows(worker.load.beat, likely_requests(worker))


def _rows(beat: WorkerHeartbeat | None, num_requests: int) -> StepShape:
    """Of a worker with so many requests that reported this."""
    if beat is None:
        return StepShape(0, 0, num_requests, 0)
    num_rows = num_requests - beat.num_waiting if num_requests > beat.num_waiting else 0
    context = beat.num_context_tokens
    if beat.num_running:  # those that are on their way are about as long as those that run
        context = context * num_rows // beat.num_running
    return StepShape(0, 0, num_rows, context)


def rows_beside(worker: Worker, rows: StepShape) -> StepShape:
    """Of these rows, those that the worker computes beside prompts: a prefill worker decodes nothing."""
    return rows if worker.role == "decode" else NOTHING


def step_tokens(worker: Worker) -> int:
    """Prompt tokens that a step of the worker computes at most, as it says."""
    beat, hello = worker.load.beat, worker.hello
    now = beat.step_tokens if beat is not None else 0
    return now or (hello.max_step_tokens if hello is not None else 0) or 512


def queued_s(worker: Worker, now: float, priority: int = -MAX_PRIORITY) -> float:
    """Seconds until the worker has computed the prompts of at least `priority` that it has, by its model and report."""
    terms = terms_of(worker)
    left_s = terms.waiting_s - max(0.0, now - worker.load.beat_at) if terms.waiting_s else 0.0
    fresh_s = terms.fresh_s
    if fresh_s and left_s <= 0.0:  # their turn has come: what was computed of them since is not left
        fresh_s -= max(0.0, now - max(worker.bookings.fresh_since, worker.load.beat_at + terms.waiting_s))
    all_s = max(0.0, fresh_s) + max(0.0, left_s)
    lower, _ = worker.bookings.total.below(priority)
    if not lower.num_tokens:
        return all_s
    return max(0.0, all_s - terms.model.steps_s(lower, terms.max_step_tokens, rows_beside(worker, terms.rows)))


def wait_s(worker: Worker, now: float, priority: int = -MAX_PRIORITY) -> float:
    """The same, corrected by how late first tokens came lately, and by how long others wait already."""
    observed_s = worker.estimates.observed_from.get(priority, worker.estimates.observed_s)
    return max(queued_s(worker, now, priority) * worker.estimates.slowness, observed_s)


def before_s(worker: Worker, shape: RequestShape, own_s: float, now: float) -> float:
    """Seconds that a prompt of `own_s` waits at the worker, where without goals shorter prompts pass longer ones."""
    all_s = wait_s(worker, now, shape.priority)
    if all_s <= 0.0:
        return 0.0
    terms = terms_of(worker)
    if shape.ttft_s > 0.0 or worker.bookings.total.num_tokens <= terms.max_step_tokens:
        return all_s
    shorter_share = worker.bookings.sizes.shorter_share(shape.uncached(worker))
    return turn_s(all_s, own_s, shorter_share, terms.full_s, now - worker.bookings.turned_at)


def place_s(
    worker: Worker, least_s: float = 0.0, num_after: int = 0, priority: int = -MAX_PRIORITY, num_more: int = 0
) -> float:
    """Seconds until the worker's batch has a place for one more: Little's law over the requests that wait before it.

    A request takes at least `least_s` there. The last `num_after` of the worker's requests do not count, and of those
    that wait for a place, as many are passed as are of lower priority among all; one place at least must become free.
    `num_more` will come before it.
    """
    terms = terms_of(worker)
    num_before = terms.num_requests - num_after + 1 - terms.num_places
    if num_before > 1 and (num_lower := worker.bookings.total.below(priority)[1]):
        num_before = max(1, num_before - num_before * num_lower // worker.bookings.total.num_requests)
    num_before += num_more
    if num_before <= 0:
        return 0.0
    return num_before * max(worker.estimates.service_s.value, worker.estimates.lasting_s, least_s) / terms.num_places


def places_of(worker: Worker) -> int:
    """Places in a worker's batch; while blocks are scarce, the places that are taken."""
    beat, hello = worker.load.beat, worker.hello
    if beat is None or hello is None:
        return 1
    if beat.num_waiting and worker.load.num_available_blocks < SCARCE * hello.num_blocks:
        return max(1, beat.num_running + beat.num_transferring)
    return beat.batch_cap or hello.max_num_seqs or 1


def on_prefill(worker: Worker, shape: RequestShape, now: float) -> Forecast:
    """A prompt on a prefill worker, which samples the first token."""
    terms = terms_of(worker)
    fetch_s = shape.fetch_s(worker)
    own_s = terms.model.steps_s(shape.prompt(worker), terms.max_step_tokens) + fetch_s
    waits_s = before_s(worker, shape, own_s, now) + shape.held_s
    return Forecast(waits_s, own_s, is_known=terms.knows_prompts, fetch_s=fetch_s, lag_s=worker.estimates.lag_s)


def on_decode(worker: Worker, shape: RequestShape) -> Forecast:
    """An answer on a decode worker, whose prompt a prefill worker computes."""
    terms = terms_of(worker)
    model = terms.model
    num_expected, num_rows = shape.num_expected, terms.rows.num_rows
    own_s = model.row_s + model.context_s * (shape.num_tokens + num_expected // 2)  # of each step: one row more
    delay_s = num_rows * num_expected * own_s
    step_s = terms.step_s + own_s
    token_s, stall_s = step_s * worker.estimates.token_pace, 0.0
    has_place = terms.num_requests < terms.num_places  # no call of `place_s`: each heartbeat asks
    batch_s = 0.0 if has_place else place_s(worker, num_expected * token_s, priority=shape.priority)
    uncached = shape.uncached(worker)
    if num_blocks := num_lacking_blocks(terms, uncached + num_expected):
        again_s = num_blocks * terms.block_size * (model.token_s or model.row_s)
        delay_s += num_rows * again_s
        stall_s = (again_s + room_s(worker, num_blocks)) / max(1, num_expected)
    arrival_s = transfer_s(terms, uncached)
    return Forecast(
        *(0.0, 0.0, batch_s, token_s + stall_s, delay_s, terms.is_known, stall_s, arrival_s, 0.0 if stall_s else step_s)
    )


def num_lacking_blocks(terms: Terms, num_tokens: int) -> int:
    """Blocks that a decode worker will lack for so many new tokens of a request and its answer, and for all others."""
    spare = terms.num_spare_blocks
    lacking = num_held_blocks(terms, num_tokens) - (spare if spare > 0 else 0)
    return lacking if lacking > 0 else 0


def num_held_blocks(terms: Terms, num_tokens: int) -> int:
    """Blocks of so many tokens that a decode worker gets and keeps."""
    num_blocks = -(-num_tokens // terms.block_size)
    return num_blocks if num_blocks < terms.most_blocks else terms.most_blocks


def room_s(worker: Worker, num_blocks: int) -> float:
    """Seconds until so many blocks that a decode worker lacks become free, by Little's law over its answers.

    The youngest answer is preempted first, and waits for them.
    """
    booked = worker.bookings.total
    if not booked.num_requests:
        return 0.0
    freed_a_s = (booked.num_blocks + booked.num_more) / max(
        worker.estimates.service_s.value, worker.estimates.lasting_s, LEAST_SERVICE_S
    )
    return num_blocks / max(1.0, freed_a_s)


def computed_there(
    worker: Worker, shape: RequestShape, remote: Forecast, now: float, like: Worker | None = None
) -> Forecast:
    """What `remote`, an answer on a decode worker, becomes when the worker computes the prompt, too.

    One that has computed no prompt yet is taken to be `STRANGE` times as slow at it as the worker `like`, if given.
    """
    terms = terms_of(worker)
    prompt, model, is_known = shape.prompt(worker), terms.model, terms.knows_prompts
    if like is not None and not is_known and terms.is_known:
        other = terms_of(like)
        is_known = other.knows_prompts
        model = msgspec.structs.replace(
            model, token_s=STRANGE * other.model.token_s, pair_s=STRANGE * other.model.pair_s
        )
    prompt_s = model.steps_s(prompt, terms.max_step_tokens, terms.rows)
    num_steps = -(-prompt.num_tokens // terms.max_step_tokens)
    stopped_s = terms.rows.num_rows * max(0.0, prompt_s - num_steps * terms.step_s)
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
    """Seconds of a decode worker's step with a chunk of the prompt, as large as usual; 0 beside no sequence."""
    terms = terms_of(worker)
    if not terms.rows.num_rows:
        return 0.0
    start = shape.hits.get(worker.address, 0)
    chunk = StepShape.of_prompt(start, start + min(terms.max_step_tokens, shape.uncached(worker)))
    return terms.model.seconds(terms.rows + chunk)


def transfer_s(terms: Terms, num_tokens: int) -> float:
    """Seconds that the KV of so many tokens takes to a decode worker once all of it is computed."""
    if terms.link.num_transfers:
        return REMOTE_S + terms.link.seconds(num_held_blocks(terms, num_tokens))
    return REMOTE_S + TRANSFER_TOKEN_S * min(num_tokens, terms.most_blocks * terms.block_size)


def hidden_s(prompt_s: float, arrival_s: float) -> float:
    """How much of a transfer is over when the prompt is: blocks cross while the next ones are computed.

    The last step's blocks, a tenth of the transfer, cross afterwards.
    """
    return min(prompt_s, HIDDEN_SHARE * max(0.0, arrival_s - REMOTE_S))


def joined(first: Forecast, then: Forecast) -> Forecast:
    """A prompt on a prefill worker, and its answer on a decode worker."""
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
    """What each step decodes in `after_s` seconds: sequences that will still run, and those that come until then.

    How long a sequence still runs does not depend on how long it has run already, so that so many of them end in each
    second. Those of which nothing is known have `num_prompt_tokens` tokens.
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
    """Seconds that a token of a new answer takes once its prompt of `num_tokens` tokens arrives, and if it ran alone.

    0 of a worker that has computed nothing yet.
    """
    if not worker.load.step_model.is_known:
        return 0.0, 0.0
    model, own = model_of(worker), StepShape.of_rows(1, num_tokens)
    return model.seconds(rows_at(worker, after_s, num_tokens) + own), model.seconds(own)
