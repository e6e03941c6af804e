import pytest
from msgspec.structs import replace

from common.config import RouterConfig
from common.errors import MAX_RETRY_AFTER_S, Overloaded
from common.latency.step_model import StepModel, StepShape
from common.wire.messages import TokenDelta
from common.wire.sampling_params import SamplingParams
from router.dispatch.admission import Admission, too_late
from router.dispatch.client import GenerationRequest
from router.dispatch.load import DispatchCounters
from router.dispatch.request_state import Assignment, RequestState
from router.dispatch.waits import lasting_s, observed_waits_s, wait_for, waits_of
from router.fleet.registry import WorkerRegistry
from router.policy.forecast import forecast_prefill
from router.policy.request_shape import RequestShape
from router.policy.routing import Choice, RoutingPolicy
from router.policy.wait_limit import NUM_REFUSED, NUM_WINDOWS, WINDOW_S

from ...fake_worker import heartbeat_of, hello_of


def worker(role: str = "prefill", *, port: int = 1, service_s: float = 0.0, **beat: object):
    """A ready worker with 100 blocks of 16 tokens and 4 places."""
    registry = WorkerRegistry([f"tcp://p:{port}"], [f"tcp://d:{port}"], worker_timeout_s=1.0)
    address = f"tcp://{role[0]}:{port}"
    told = heartbeat_of(role, **({"num_free_blocks": 100} | beat))
    if rate := told.full_tokens_per_s:
        model = StepModel(token_s=1 / rate, num_steps=100)
        told = replace(told, step_model=model, waiting_s=told.num_waiting_tokens / rate)
    layout = {"block_size": 16, "num_blocks": 100, "max_model_len": 512, "max_num_seqs": 4}
    registry.on_hello(address, hello_of(role, role, **layout), 0.0)
    registry.on_heartbeat(address, told, 0.0)
    if service_s:
        registry.on_request_finished(address, service_s)
    return registry.workers[address]


def decode(**fields):
    return worker("decode", **fields)


def wait_s(prefill, decode, observed=None, lasting=None):
    """What a prompt of 65 tokens would wait where it would be placed, with these workers."""
    registry = WorkerRegistry([], [], worker_timeout_s=1.0)
    for each in (*prefill, *decode):
        registry.workers[each.address] = each
    admission = Admission(registry, RoutingPolicy(), RouterConfig(model="m"), DispatchCounters())
    registry.on_observed(observed or {}, lasting or {})
    choice = admission.place_for(65, 0.0)
    return wait_for(choice.prefill or choice.decode, choice.decode, 0.0).seconds if choice else 0


def test_a_prompt_waits_for_those_before_it():
    busy = worker(num_waiting_tokens=10_000, full_tokens_per_s=1000.0)
    assert wait_s([busy], [decode()]) == pytest.approx(10.0)


def test_the_best_worker_counts():
    busy = worker(num_waiting_tokens=10_000, full_tokens_per_s=1000.0)
    assert wait_s([busy, worker(port=2, full_tokens_per_s=1000.0)], [decode()]) == 0


def test_a_rate_that_nobody_has_seen_refuses_nobody():
    assert wait_s([worker(num_waiting_tokens=10**9, tokens_per_s=1.0)], [decode()]) == 0


def test_without_prefill_workers_decode_workers_compute_the_prompts():
    assert wait_s([], [decode(num_waiting_tokens=500, full_tokens_per_s=100.0)]) == pytest.approx(5.0)


def test_a_full_batch_makes_wait_by_littles_law():
    assert wait_s([], [decode(num_running=3, service_s=8.0)]) == 0
    full = decode(num_running=4, num_waiting=7, service_s=8.0)
    assert wait_s([], [full]) == pytest.approx(8 * 8.0 / 4)
    capped = decode(num_running=2, num_waiting=1, batch_cap=2, service_s=8.0)
    assert wait_s([], [capped]) == pytest.approx(2 * 8.0 / 2), "places that a goal keeps free are none"


def test_without_blocks_to_give_only_those_that_run_are_places():
    full = decode(num_running=2, num_waiting=3, num_free_blocks=1, num_owned_blocks=99, service_s=8.0)
    assert wait_s([], [full]) == pytest.approx(4 * 8.0 / 2)


def test_what_runs_for_long_already_tells_what_nothing_that_ended_told():
    full = decode(num_running=4, num_waiting=7, service_s=0.5)
    assert lasting_s({"tcp://d:1": {str(number): 40.0 for number in range(3)}}, 100.0) == {}, "a few long answers"
    lasting = lasting_s({"tcp://d:1": {str(at): at for at in (99.0, 94.0, 92.0, 40.0)}}, 100.0)
    assert lasting == {"tcp://d:1": 6.0}
    assert wait_s([], [full], lasting=lasting) == pytest.approx(8 * 6.0 / 4)
    assert wait_s([], [decode(num_running=3, service_s=0.5)], lasting=lasting) == 0


def test_nobody_ready_is_another_matter():
    assert wait_s([], []) == 0


def test_a_refusal_says_when_to_come_back():
    error = too_late(42.0, 30.0)
    assert (error.status, error.retry_after_s) == (429, pytest.approx(12.0))
    assert "42.0 s" in error.message
    assert "30 s" in error.message
    assert too_late(1e6, 30.0).retry_after_s == MAX_RETRY_AFTER_S


def test_who_is_refused_later_is_to_come_back_later():
    prefill = worker(full_tokens_per_s=1000.0)
    admission = admission_of(prefill, decode(), slo_ttft_ms=0.0)
    for now in range(100):
        placed(admission, prefill, 500, float(now))
    after_s = []
    for _ in range(20):
        with pytest.raises(Overloaded) as caught:
            check(admission, 500)
        after_s.append(caught.value.retry_after_s)
    assert after_s[0] == pytest.approx(20.0)
    assert after_s[10] == pytest.approx(25.0, abs=0.1), "ten prompts of half a second come first"
    assert after_s == sorted(after_s)


def test_an_slo_refuses_earlier():
    assert admission_of(worker(), decode()).limit_s == 1.0
    assert admission_of(worker(), decode(), slo_ttft_ms=0.0).limit_s == 30.0
    assert admission_of(worker(), decode(), slo_ttft_ms=1e6).limit_s == 30.0
    assert admission_of(worker(), decode(), slo_refuse="overload").limit_s == 30.0


def test_those_who_wait_already_tell_what_no_rate_told():
    few = [("tcp://p:1", wait_s) for wait_s in (60.0, 50.0, 40.0)]
    assert observed_waits_s(few) == {}, "a few long prompts"
    many = [*few, ("tcp://p:1", 30.0), ("tcp://p:1", 1.0), ("tcp://q:1", 99.0)]
    assert observed_waits_s(many) == {"tcp://p:1": 30.0}
    assert wait_s([worker()], [decode()], observed_waits_s(many)) == 30.0


def test_one_worker_that_does_not_get_on_keeps_nobody_from_the_others():
    assert wait_s([worker(), worker(port=2)], [decode()], {"tcp://p:1": 30.0}) == 0


# ---------------------------------------------------------------- before the body is read


def admission_of(prefill, decode, **fields):
    """Of a router with an SLO of a second, by which it refuses, and these two workers.

    Prompts of up to 64 tokens are prefilled by decode.
    """
    config = RouterConfig(**{"model": "m", "slo_ttft_ms": 1000.0, "slo_refuse": "predicted"} | fields)
    registry = WorkerRegistry([prefill.address], [decode.address], worker_timeout_s=1.0)
    registry.workers = {prefill.address: prefill, decode.address: decode}
    policy = RoutingPolicy(local_prefill_threshold=config.local_prefill_threshold)
    return Admission(registry, policy, config, DispatchCounters())


def check(admission, num_tokens):
    admission.check(admission.place_for(num_tokens, 0.0), 0.0)


def busy(role):
    return worker(role, num_waiting_tokens=10_000, full_tokens_per_s=1000.0)


def refuses(admission, num_tokens):
    try:
        check(admission, num_tokens)
    except Overloaded:
        return True
    return False


def refuses_unread(admission, is_longer):
    try:
        admission.check_unread(is_longer, 0.0)
    except Overloaded:
        return True
    return False


@pytest.mark.parametrize("busy_prefill", [False, True])
@pytest.mark.parametrize("busy_decode", [False, True])
def test_what_is_refused_unread_would_be_refused_whatever_it_is(busy_prefill, busy_decode):
    admission = admission_of(busy("prefill") if busy_prefill else worker(), busy("decode") if busy_decode else decode())
    short, long = refuses(admission, 64), refuses(admission, 65)
    assert (short, long) == (busy_decode, busy_prefill)
    assert refuses_unread(admission, lambda num_tokens: False) == (short and long)
    assert refuses_unread(admission, lambda num_tokens: num_tokens <= 64) == long


def test_nobody_looks_at_a_prompt_whose_length_does_not_matter():
    def is_longer(num_tokens):
        raise AssertionError("this may cost something")

    assert not refuses_unread(admission_of(worker(), busy("decode")), is_longer)
    assert refuses_unread(admission_of(busy("prefill"), busy("decode")), is_longer)


@pytest.mark.parametrize("ttft_ms", [0.0, 1000.0])
@pytest.mark.parametrize("num_running", [0, 4])
def test_workers_that_are_far_from_an_overload_are_not_weighed_and_the_answer_is_the_same(
    monkeypatch, ttft_ms, num_running
):
    """At each load either way of asking says the same; the quick one answers at low loads and nowhere near a limit."""
    answers = []
    for num_waiting in (0, 100, 200, 300, 1000, 10_000, 29_000, 40_000):
        prefill = worker(num_waiting_tokens=num_waiting, full_tokens_per_s=1000.0)
        full = decode(num_running=num_running, num_waiting=num_running, service_s=num_waiting / 1000)
        admission = admission_of(prefill, full, slo_ttft_ms=ttft_ms)
        sure = admission._is_surely_in_time((prefill, full), 0.0, admission._classes["default"])
        quick = refuses_unread(admission, lambda num_tokens: True)
        with monkeypatch.context() as patch:
            patch.setattr(Admission, "_is_surely_in_time", lambda *_: False)
            assert quick == refuses_unread(admission, lambda num_tokens: True)
        answers.append((sure, quick))
    assert answers[0] == (True, False) and answers[-1] == (False, True)
    assert (True, True) not in answers


# ---------------------------------------------------------------- more than can be served


def shape_of(num_tokens):
    return RequestShape(num_tokens, 2, {})


def placed(admission, worker, num_tokens, now):
    """A prompt that waits at `worker`."""
    state = RequestState(GenerationRequest(f"r{now}", [1] * num_tokens, SamplingParams(max_tokens=2)), now)
    booking = admission._registry.book(worker.address, 0.0, prompt=StepShape.of_prompt(0, num_tokens), num_blocks=1)
    state.assign(Assignment(worker.role, worker.address, worker.worker_id, 1, 0, booking, 0, 0), now)
    admission.expect(state, Choice(worker, None, forecast_prefill(worker, shape_of(num_tokens), 0.0)), now)
    return state


def overload(admission, states, now=0.0):
    """Refusals for as long as it takes; what is shed at the end."""
    for turn in range(NUM_WINDOWS + 1):
        for _ in range(NUM_REFUSED):
            assert refuses(admission, 1000)
        if shed := admission.shed(states, now + turn * WINDOW_S):
            return dict(shed)
    return {}


def test_an_overload_that_lasts_makes_the_queue_short():
    prefill = worker(full_tokens_per_s=1000.0)
    admission = admission_of(prefill, decode(), slo_ttft_ms=0.0)
    states = [placed(admission, prefill, 100, now / 10) for now in range(350)]
    assert admission.limit_s == 30.0
    shed = overload(admission, reversed(states))
    assert admission.limit_s == 0.5
    assert list(shed) == states[6:], "who came first keeps his place"
    error = shed[states[10]]
    assert (error.status, error.retry_after_s) == (429, 1.0)
    assert "1.0 s more" in error.message and "the limit is 0.5 s" in error.message
    for state in shed:
        admission._registry.release(state.waits_for.booking)
    assert refuses(admission, 1000), "0.6 s of prompts are there"
    admission._registry.release(states[0].waits_for.booking)
    assert not refuses(admission, 1000)


def test_a_short_queue_has_room_for_a_few_prompts_however_long():
    prefill = worker(full_tokens_per_s=1000.0)
    admission = admission_of(prefill, decode(), slo_ttft_ms=0.0)
    states = [placed(admission, prefill, 2000, float(now)) for now in range(100)]
    shed = overload(admission, states)
    assert admission.limit_s == pytest.approx(6.0, abs=0.1)
    assert list(shed) == states[3:]
    for state in shed:
        admission._registry.release(state.waits_for.booking)
    assert refuses(admission, 1000)
    admission._registry.release(states[0].waits_for.booking)
    assert not refuses(admission, 1000)


def test_places_of_decode_workers_are_waited_for_in_turn():
    batch = decode(service_s=40.0, num_running=4)
    admission = admission_of(worker(), batch, slo_ttft_ms=0.0, local_prefill_threshold=2000)
    states = [placed(admission, batch, 1, float(now)) for now in range(20)]
    waits = [each for _, each in waits_of(states, admission._registry.workers)]
    assert waits == [10.0 * (1 + turn) for turn in range(20)]


def test_whose_stream_has_begun_is_never_shed():
    prefill = worker(full_tokens_per_s=1000.0)
    admission = admission_of(prefill, decode(), slo_ttft_ms=0.0)
    states = [placed(admission, prefill, 1000, float(now)) for now in range(40)]
    late = states[20]
    late.receive(late.waits_for, TokenDelta("r", 0, 0, (7,)), 20.0)
    shed = overload(admission, states)
    assert late not in shed and states[19] in shed


def test_with_an_slo_the_queue_is_short_already():
    prefill = worker(full_tokens_per_s=1000.0)
    admission = admission_of(prefill, decode(), slo_ttft_ms=500.0)
    states = [placed(admission, prefill, 100, float(now)) for now in range(20)]
    assert overload(admission, states) == {}
    assert admission.limit_s == 0.5


def test_patience_comes_back_when_all_can_be_served():
    prefill = worker(full_tokens_per_s=1000.0)
    admission = admission_of(prefill, decode(), slo_ttft_ms=0.0)
    states = [placed(admission, prefill, 1000, float(now)) for now in range(40)]
    assert overload(admission, states)
    for state in states:
        admission._registry.release(state.waits_for.booking)
    assert admission.shed([], 1000.0) == []
    assert admission.limit_s == 30.0


# ---------------------------------------------------------------- places in a batch behind the first token


def full_batch():
    """A decode worker whose four places are taken for 2 s: the next one is free in 0.5 s, by Little's law."""
    model = StepModel(fixed_s=5e-3, row_s=1e-4, num_steps=100)
    return decode(service_s=2.0, num_running=4, num_context_tokens=400, step_model=model)


def refuses_answer(num_expected, *, tpot_ms=20.0, prefill=None, num_tokens=100):
    """Whether a prompt is refused whose answer has so many tokens, with 0.2 s for the first one."""
    fields = {"slo_ttft_ms": 200.0, "slo_tpot_ms": tpot_ms, "overload_wait_s": 1.0}
    admission = admission_of(prefill or worker(full_tokens_per_s=10_000.0), full_batch(), **fields)
    choice = admission.place_for(num_tokens, 0.0)
    try:
        admission.check(choice, 0.0, num_tokens=num_tokens, num_expected=num_expected)
    except Overloaded:
        return True
    return False


def test_an_answer_may_wait_for_its_place_as_long_as_its_tokens_are_early_in_all():
    assert refuses_answer(10), "10 tokens are 0.15 s early in all"
    assert not refuses_answer(100), "100 tokens are 1.5 s early"


def test_a_long_ttft_goal_lets_no_answer_wait_behind_its_first_token():
    """It waits 0.5 s for its place, whatever time its first token would have had."""
    fields = {"slo_ttft_ms": 5000.0, "slo_tpot_ms": 20.0}
    admission = admission_of(worker(full_tokens_per_s=10_000.0), full_batch(), **fields)
    choice = admission.place_for(100, 0.0)
    with pytest.raises(Overloaded, match=r"TPOT goal 20 ms, predicted \d+\.\d ms: 4 sequences in a batch of 4\."):
        admission.check(choice, 0.0, num_tokens=100, num_expected=20)
    admission.check(choice, 0.0, num_tokens=100, num_expected=200)


def test_without_a_goal_for_tokens_a_place_must_come_in_time_for_the_first():
    assert refuses_answer(100, tpot_ms=0.0)
