"""What first tokens teach about the next prediction: of the worker, and of what comes behind its steps."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.errors import Overloaded
from common.latency.step_model import StepShape
from common.wire.messages import TokenDelta
from common.wire.sampling_params import SamplingParams
from router.dispatch.client import GenerationRequest
from router.dispatch.request_state import Assignment, RequestState
from router.policy.forecast import forecast_prefill
from router.policy.routing import Choice

from .test_admission import admission_of, check, decode, refuses, shape_of, worker


def first_token(admission, prefill, num_tokens, after_s, num_taken_back=0):
    """A prompt is placed on `prefill` at 0 and its first token comes."""
    registry = admission._registry
    state = RequestState(GenerationRequest("r", [1] * num_tokens, SamplingParams(max_tokens=2)), 0.0)
    state.forecast = forecast_prefill(prefill, shape_of(num_tokens), 0.0)
    booking = registry.book(prefill.address, 0.0, prompt=StepShape.of_prompt(0, num_tokens), num_blocks=1)
    state.assign(assignment := Assignment("prefill", prefill.address, "p", 1, 0, booking, 0, 0), 0.0)
    state.attempts.num_taken_back = num_taken_back
    admission.expect(state, Choice(prefill, None, state.forecast), 0.0)
    admission.learn(state, assignment, after_s)
    state.receive(assignment, TokenDelta("r", 0, 0, (7,)), after_s)
    admission.learn(state, assignment, 100.0)  # what comes later is no first token
    registry.release(booking)


def test_first_tokens_later_than_predicted_lengthen_the_next_prediction():
    prefill = worker(num_waiting_tokens=400, full_tokens_per_s=1000.0)
    admission = admission_of(prefill, decode())
    assert not refuses(admission, 100)
    for _ in range(30):
        first_token(admission, prefill, 100, after_s=1.5)  # three times the half second that was predicted
    with pytest.raises(Overloaded, match=r"predicted 1,\d+ ms: "):
        check(admission, 100)
    for _ in range(30):
        first_token(admission, prefill, 100, after_s=0.1)
    assert not refuses(admission, 100), "and those in time shorten it"


def test_a_new_worker_at_the_address_is_taken_at_its_word():
    prefill = worker(num_waiting_tokens=400, full_tokens_per_s=1000.0)
    admission = admission_of(prefill, decode())
    for _ in range(30):
        first_token(admission, prefill, 100, after_s=1.5)
    beat = prefill.load.beat
    admission._registry.on_hello(prefill.address, replace(prefill.identity, epoch=2), 1.0)
    admission._registry.on_heartbeat(prefill.address, replace(beat, epoch=2), 1.0)
    assert not refuses(admission, 100)


def test_a_short_prediction_that_proves_wrong_says_nothing():
    prefill = worker(full_tokens_per_s=1000.0)
    admission = admission_of(prefill, decode())
    for _ in range(30):
        first_token(admission, prefill, 40, after_s=2.0)
    assert prefill.estimates.slowness == 1.0


def test_a_prompt_that_waits_for_no_other_says_how_late_first_tokens_come():
    prefill = worker(full_tokens_per_s=1000.0)
    admission = admission_of(prefill, decode())
    for _ in range(30):
        first_token(admission, prefill, 100, after_s=0.12)
    admission._registry.sweep(0.1)
    assert forecast_prefill(prefill, shape_of(100), 0.0).lag_s == pytest.approx(0.02, rel=0.01)
    assert prefill.estimates.slowness < 1.2, "what is lag makes no worker slow"


@pytest.mark.parametrize(("num_waiting", "num_taken_back"), [(400, 0), (0, 1)])
def test_other_prompts_say_nothing_of_it(num_waiting, num_taken_back):
    prefill = worker(num_waiting_tokens=num_waiting, full_tokens_per_s=1000.0)
    first_token(admission := admission_of(prefill, decode()), prefill, 100, 0.9, num_taken_back)
    admission._registry.sweep(0.1)
    assert prefill.estimates.lag_s == 0.0
