"""What a place would mean for a request: predicted times, term by term. Pure.

Routing, local prefill and admission all ask here, so they cannot contradict each other. The times come from the models
that workers fit to their own steps (`StepModel`). A worker that has computed nothing yet is taken for one like others
of its pool; in a new pool for `UNKNOWN`, whose costs only tell more work from less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from common.latency.step_model import StepModel, StepShape
from common.wire.message_fields import MAX_PRIORITY
from router.fleet.worker import Worker

UNKNOWN = StepModel(fixed_s=1e-3, token_s=1e-4, row_s=1e-4, context_s=1e-8)
TRANSFER_TOKEN_S = 2e-6
"""For the KV of a token on its way to a decode worker: 23 KB at 10 GB/s. It only breaks ties."""
REMOTE_S = 2e-3
"""Messages and wake-ups of a second worker."""
SCARCE = 0.05
"""A decode worker with less than this share of its blocks to give is full, whatever its number of sequences."""
NO_HITS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What is weighed of a request. `hits`: prompt tokens that a worker has cached, by its address.

    `alone`: the worker that computes the prompt also makes the whole answer. Of the `num_remaining` tokens that the
    answer may have, `num_expected` are likely. Prompts of lower `priority` do not delay it; those that the router holds
    take `held_s` seconds of each prefill worker before it.
    """

    num_tokens: int
    num_remaining: int
    hits: Mapping[str, int]
    alone: bool = False
    num_expected: int = 256
    priority: int = 0
    held_s: float = 0.0

    def uncached(self, worker: Worker) -> int:
        """Prompt tokens that the worker must compute: at least the last one, whose logits are needed."""
        return max(1, self.num_tokens - self.hits.get(worker.address, 0))

    def prompt(self, worker: Worker) -> StepShape:
        """The same, as what a step computes."""
        return StepShape.of_prompt(self.num_tokens - self.uncached(worker), self.num_tokens)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds. `wait_s`: prompts that are computed before this one. `prompt_s`: its own. `place_s`: until the decode
    worker's batch has a place. `token_s`: a token after the first. `delay_s`: what all sequences that run there lose.
    """

    wait_s: float = 0.0
    prompt_s: float = 0.0
    place_s: float = 0.0
    token_s: float = 0.0
    delay_s: float = 0.0
    is_known: bool = False

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.prompt_s


def model_of(worker: Worker) -> StepModel:
    model = worker.likely_model
    return model if model.is_known else UNKNOWN


def rows_of(worker: Worker) -> StepShape:
    """What each step of a decode worker computes beside prompts."""
    beat = worker.beat
    if beat is None:
        return StepShape.of_rows(worker.num_requests, 0)
    num_rows = max(0, worker.num_requests - beat.num_waiting)
    context = beat.num_context_tokens
    if beat.num_running:  # those that are on their way are about as long as those that run
        context = context * num_rows // beat.num_running
    return StepShape.of_rows(num_rows, context)


def step_tokens(worker: Worker) -> int:
    """Prompt tokens that a step of the worker computes at most."""
    return worker.identity.max_step_tokens or 512


def queued_s(worker: Worker, now: float, priority: int = -MAX_PRIORITY) -> float:
    """Seconds until the worker has computed the prompts of at least `priority` that it has, by its model and report."""
    reported_s = max(0.0, worker.beat.waiting_s - max(0.0, now - worker.beat_at)) if worker.beat else 0.0
    lower, _ = worker.booked.below(priority)
    if not (worker.fresh.num_tokens or lower.num_tokens):
        return reported_s
    beside = rows_of(worker) if worker.role == "decode" else StepShape()
    model, most_tokens = model_of(worker), step_tokens(worker)
    fresh_s, lower_s = (model.steps_s(prompt, most_tokens, beside) for prompt in (worker.fresh.prompt, lower))
    return max(0.0, reported_s + fresh_s - lower_s)


def wait_s(worker: Worker, now: float, priority: int = -MAX_PRIORITY) -> float:
    """The same, corrected by how late first tokens came lately, and by how long others wait already."""
    observed_s = worker.observed_from.get(priority, worker.observed_s)
    return max(queued_s(worker, now, priority) * worker.slowness.value, observed_s)


def place_s(
    worker: Worker, least_s: float = 0.0, num_after: int = 0, priority: int = -MAX_PRIORITY, num_more: int = 0
) -> float:
    """Seconds until the worker's batch has a place for one more: Little's law over the requests that wait before it.

    A request takes at least `least_s` there. The last `num_after` of the worker's requests do not count, and of those
    that wait for a place, as many are passed as are of lower priority among all; one place at least must become free.
    `num_more` will come before it.
    """
    num_places = places_of(worker)
    num_before = worker.num_requests - num_after + 1 - num_places
    if num_before > 1 and (num_lower := worker.booked.below(priority)[1]):
        num_before = max(1, num_before - num_before * num_lower // worker.booked.num_requests)
    return max(0, num_before + num_more) * max(worker.service_s.value, worker.lasting_s, least_s) / num_places


def places_of(worker: Worker) -> int:
    """Places in a worker's batch; while blocks are scarce, the places that are taken."""
    beat, hello = worker.beat, worker.hello
    if beat is None or hello is None:
        return 1
    if beat.num_waiting and worker.num_available_blocks < SCARCE * hello.num_blocks:
        return max(1, beat.num_running + beat.num_transferring)
    return max(1, hello.max_num_seqs)


def on_prefill(worker: Worker, shape: RequestShape, now: float) -> Forecast:
    """A prompt on a prefill worker, which samples the first token."""
    own_s = model_of(worker).steps_s(shape.prompt(worker), step_tokens(worker))
    before_s = wait_s(worker, now, shape.priority) + shape.held_s
    return Forecast(wait_s=before_s, prompt_s=own_s, is_known=worker.step_model.knows_prompts)


def on_decode(worker: Worker, shape: RequestShape, now: float, *, local: bool) -> Forecast:
    """An answer on a decode worker; with `local` it computes the prompt, too."""
    model, beside = model_of(worker), rows_of(worker)
    own = StepShape.of_rows(1, shape.num_tokens + shape.num_expected // 2)
    slower_s = model.row_s * own.num_rows + model.context_s * own.context  # of each step with one row more
    delay_s = beside.num_rows * shape.num_expected * slower_s
    before_s = prompt_s = 0.0
    is_known = worker.step_model.is_known
    if local:
        is_known = worker.step_model.knows_prompts
        prompt = shape.prompt(worker)
        before_s = wait_s(worker, now, shape.priority)
        prompt_s = model.steps_s(prompt, step_tokens(worker), beside)
        num_steps = -(-prompt.num_tokens // step_tokens(worker))
        delay_s += beside.num_rows * max(0.0, prompt_s - num_steps * model.seconds(beside))
    else:
        delay_s += REMOTE_S + TRANSFER_TOKEN_S * shape.uncached(worker)
    token_s = model.seconds(beside + own)
    batch_s = place_s(worker, shape.num_expected * token_s, priority=shape.priority)
    return Forecast(before_s, prompt_s, batch_s, token_s, delay_s, is_known)


def joined(first: Forecast, then: Forecast) -> Forecast:
    """A prompt on a prefill worker, and its answer on a decode worker."""
    return Forecast(
        first.wait_s, first.prompt_s, then.place_s, then.token_s, then.delay_s, first.is_known and then.is_known
    )
