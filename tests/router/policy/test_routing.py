from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.latency.link_model import LinkModel, Links
from common.latency.step_model import StepModel, StepShape
from router.fleet.registry import WorkerRegistry
from router.fleet.worker import WorkerState
from router.policy.forecast import forecast_decode
from router.policy.request_shape import RequestShape
from router.policy.routing import RoutingPolicy

from ...fake_worker import heartbeat_of, hello_of

POLICY = RoutingPolicy(local_prefill_threshold=64)
REMOTE = RoutingPolicy(local_prefill_threshold=0)


def pool(prefill=2, decode=2, *, fingerprints=None, num_blocks=1000):
    """A registry of ready workers named p0, p1, ..., d0, d1, ..."""
    registry = WorkerRegistry([f"p{i}" for i in range(prefill)], [f"d{i}" for i in range(decode)], worker_timeout_s=2.0)
    for address, worker in registry.workers.items():
        layout = {"block_size": 16, "num_blocks": num_blocks, "max_num_seqs": 8}
        hello = hello_of(address, worker.role, fingerprint=(fingerprints or {}).get(address, "f"), **layout)
        registry.on_hello(address, hello, 0.0)
        worker.state = WorkerState.READY
    return registry


def choose(registry, num_tokens=500, num_remaining=100, hits=None, policy=POLICY):
    shape = RequestShape(num_tokens, num_remaining, hits or {})
    return policy.choose(registry.ready("prefill"), registry.ready("decode"), shape, 0.0)


def names(choice):
    return (choice.prefill and choice.prefill.address, choice.decode and choice.decode.address)


def test_a_long_prompt_is_disaggregated():
    assert names(choose(pool())) == ("p0", "d0")


def test_a_short_uncached_tail_is_local():
    assert names(choose(pool(), num_tokens=64)) == (None, "d0")
    assert names(choose(pool(), num_tokens=65)) == ("p0", "d0")
    assert names(choose(pool(), hits={"d1": 480})) == (None, "d1")


def test_one_worker_alone_computes_a_prompt_with_prompt_logprobs_and_its_answer():
    shape, registry = RequestShape(500, 100, {}, alone=True), pool()
    assert names(POLICY.choose(registry.ready("prefill"), registry.ready("decode"), shape, 0.0)) == (None, "d0")
    shape = RequestShape(500, 1, {}, alone=True)
    assert names(POLICY.choose(registry.ready("prefill"), registry.ready("decode"), shape, 0.0)) == ("p0", None)


def test_one_token_needs_prefill_only():
    assert names(choose(pool(), num_remaining=1)) == ("p0", None)
    assert names(choose(pool(prefill=0), num_remaining=1)) == (None, "d0")


def test_nobody_ready_is_no_choice():
    assert choose(pool(decode=0)) is None


def test_only_equal_fingerprints_are_paired():
    assert names(choose(pool(fingerprints={"p0": "g", "d0": "h", "d1": "h"}))) == (None, "d0")
    assert names(choose(pool(fingerprints={"p0": "g"}))) == ("p1", "d0")


def test_prefill_goes_where_least_is_queued_unless_a_hit_saves_more():
    registry = pool()
    registry.book("p0", 0.0, prompt=StepShape.of_prompt(0, 300), num_blocks=0)
    assert choose(registry).prefill.address == "p1"
    assert choose(registry, hits={"p0": 200}).prefill.address == "p1"
    assert choose(registry, hits={"p0": 400}).prefill.address == "p0"


def test_decode_goes_where_a_hit_is_but_not_to_a_busy_worker():
    registry = pool()
    assert choose(registry, hits={"d1": 400}).decode.address == "d1"
    for _ in range(5):
        registry.book("d1", 0.0, prompt=StepShape.of_prompt(0, 0), num_blocks=1)
    assert choose(registry, hits={"d1": 400}).decode.address == "d0"


def test_decode_without_room_comes_last():
    registry = pool()
    registry.book("d0", 0.0, prompt=StepShape.of_prompt(0, 0), num_blocks=980)
    for _ in range(6):
        registry.book("d1", 0.0, prompt=StepShape.of_prompt(0, 0), num_blocks=1)
    assert choose(registry).decode.address == "d1"


def test_a_suspect_comes_last():
    registry = pool()
    for address in ("p0", "d0"):
        for _ in range(3):
            registry.on_request_failed(address, 0.0)
    assert names(choose(registry)) == ("p1", "d1")


def test_equal_workers_take_turns():
    registry = pool(decode=3)
    picks = Counter()
    for _ in range(30):
        decode = choose(registry).decode
        picks[decode.address] += 1
        registry.release(registry.book(decode.address, 0.0, prompt=StepShape.of_prompt(0, 0), num_blocks=1))
    assert picks == {"d0": 10, "d1": 10, "d2": 10}


@pytest.mark.parametrize("prefill", [0, 2])
def test_one_shared_system_prompt_does_not_pin_all_traffic(prefill):
    registry, held, picks = pool(prefill=prefill, decode=4), {}, Counter()
    for _ in range(40):
        choice = choose(registry, num_tokens=1100, hits=held, policy=RoutingPolicy(local_prefill_threshold=0))
        for worker in filter(None, (choice.decode, choice.prefill)):
            computes = worker is choice.prefill or choice.local
            num_tokens = 1100 - held.get(worker.address, 0) if computes else 0
            registry.book(worker.address, 0.0, prompt=StepShape.of_prompt(0, num_tokens), num_blocks=10)
            held[worker.address] = 1024
            picks[worker.address] += 1
    assert max(picks[f"d{i}"] for i in range(4)) - min(picks[f"d{i}"] for i in range(4)) <= 5


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 2000)), max_size=30), st.integers(1, 3000), st.integers(1, 50)
)
def test_a_choice_is_sound_and_a_function_of_state(bookings, num_tokens, num_remaining):
    registry = pool(prefill=2, decode=3, fingerprints={"p1": "g", "d2": "g"})
    for worker, tokens in bookings:
        address = ("p0", "p1", "d0", "d1", "d2")[worker]
        registry.book(address, 0.0, prompt=StepShape.of_prompt(0, tokens), num_blocks=tokens // 16)
    choice = choose(registry, num_tokens, num_remaining)
    assert names(choice) == names(choose(registry, num_tokens, num_remaining))
    if choice.prefill and choice.decode:
        assert choice.prefill.identity.fingerprint == choice.decode.identity.fingerprint
    assert (choice.decode is None) == (num_remaining == 1)
    assert choice.local == (num_remaining > 1 and num_tokens <= POLICY.local_prefill_threshold)


# ---------------------------------------------------------------- what models of steps predict

FAST = StepModel(fixed_s=1e-3, token_s=1e-4, row_s=1e-4, context_s=1e-8, num_steps=100)


def report(registry, address, model=FAST, **beat):
    """The worker reports."""
    registry.on_heartbeat(address, heartbeat_of(address, step_model=model, **beat), 0.0)


def reported(**beats):
    """A pool of which every worker has reported, with what `beats` say for some."""
    registry = pool()
    for address in registry.workers:
        report(registry, address, **beats.get(address, {}))
    return registry


def test_a_slower_worker_gets_a_prompt_only_when_the_faster_one_is_busy():
    slow = {"model": StepModel(fixed_s=1e-3, token_s=4e-4, num_steps=100)}
    assert choose(reported(p0=slow), policy=REMOTE).prefill.address == "p1"
    assert choose(reported(p0=slow, p1={"waiting_s": 0.1}), policy=REMOTE).prefill.address == "p1"
    assert choose(reported(p0=slow, p1={"waiting_s": 0.2}), policy=REMOTE).prefill.address == "p0"


def test_an_answer_goes_where_its_tokens_come_sooner():
    slow = {"model": StepModel(fixed_s=4e-3, row_s=1e-4, num_steps=100)}
    assert choose(reported(d0=slow)).decode.address == "d1"
    crowd = {"num_running": 7, "num_context_tokens": 7000, "model": StepModel(fixed_s=1e-3, row_s=2e-3, num_steps=9)}
    assert choose(reported(d0=crowd)).decode.address == "d1"


def test_workers_that_differ_by_less_than_predictions_err_take_turns():
    noisy = {f"d{i}": {"model": StepModel(fixed_s=1e-3 * (1 + i / 100), row_s=1e-6, num_steps=100)} for i in range(2)}
    registry, picks = reported(**noisy), Counter()
    for _ in range(10):
        picks[(decode := choose(registry).decode).address] += 1
        registry.book(decode.address, 0.0, prompt=StepShape(), num_blocks=1)
    assert picks == {"d0": 5, "d1": 5}


def test_a_new_worker_is_taken_for_one_like_its_pool():
    registry = pool()
    slow = StepModel(fixed_s=0.05, row_s=0.01, num_steps=100)
    report(registry, "d0", slow)
    report(registry, "d1", StepModel())
    assert choose(registry).decode.address == "d0", "equal, and its turn"
    registry.book("d0", 0.0, prompt=StepShape(), num_blocks=1)
    assert choose(registry).decode.address == "d1"
    registry.book("d1", 0.0, prompt=StepShape(), num_blocks=1)
    assert choose(registry).decode.address == "d0", "the new one is no faster for being unknown"


def test_a_long_prompt_stays_with_an_idle_decode_worker_while_prefill_workers_are_busy():
    busy = {"waiting_s": 5.0}
    assert names(choose(reported(p0=busy, p1=busy))) == (None, "d0")
    assert names(choose(reported(p0=busy, p1={"waiting_s": 0.01}))) == ("p1", "d0"), "it has not long to wait"
    assert names(choose(reported(p0=busy, p1=busy), policy=REMOTE)) == ("p0", "d0"), "the user forbids it"


def test_a_long_prompt_does_not_stop_the_streams_of_a_busy_decode_worker():
    busy = {"waiting_s": 0.2}
    crowd = {"num_running": 8, "num_context_tokens": 8000}
    assert choose(reported(p0=busy, p1=busy, d0=crowd, d1=crowd), num_tokens=4000).prefill is not None


def test_a_short_prompt_goes_to_a_prefill_worker_when_decode_workers_compute_long_ones():
    busy = {"waiting_s": 3.0, "num_waiting_tokens": 30_000}
    assert names(choose(reported(d0=busy, d1=busy), num_tokens=60)) == ("p0", "d0")


def test_nothing_is_predicted_from_workers_that_computed_nothing():
    registry = pool()
    registry.book("p0", 0.0, prompt=StepShape.of_prompt(0, 100_000), num_blocks=0)
    registry.book("p1", 0.0, prompt=StepShape.of_prompt(0, 100_000), num_blocks=0)
    choice = choose(registry)
    assert not choice.forecast.is_known and choice.prefill is not None


def test_a_decode_worker_that_computed_no_prompt_is_not_taken_for_a_fast_one():
    busy, rows_only = {"waiting_s": 5.0}, {"model": StepModel(fixed_s=5e-3, row_s=1e-4, num_steps=100)}
    choice = choose(reported(p0=busy, p1=busy, d0=rows_only, d1=rows_only))
    assert choice.prefill is not None


def test_a_router_counts_on_others_that_fill_the_emptiest_worker_as_it_does():
    loads = {"d0": {"num_running": 4, "num_context_tokens": 4000}, "d1": {"num_running": 1, "num_context_tokens": 1000}}
    registry, picks = reported(**loads), Counter()
    for worker in registry.workers.values():
        worker.estimates.other_routers = 3.0
    for _ in range(4):
        picks[(decode := choose(registry).decode).address] += 1
        registry.book(decode.address, 0.0, prompt=StepShape(), num_blocks=1)
    assert picks == {"d0": 2, "d1": 2}, "alone it would send three to d1, and four routers twelve"


def test_how_much_other_routers_send_is_seen_in_reports():
    registry = reported()
    registry.book("d0", 0.0, prompt=StepShape(), num_blocks=1)
    serial = registry.book("d1", 0.0, prompt=StepShape(), num_blocks=1).serial
    for now in range(40):
        for address in ("d0", "d1"):
            report(registry, address, num_running=4, num_context_tokens=400, serial=serial)
            registry.workers[address].life.last_seen = float(now)
        for address in ("p0", "p1"):
            registry.workers[address].life.last_seen = float(now)
        registry.sweep(float(now))
    assert registry.workers["d0"].estimates.other_routers == pytest.approx(3.0, rel=0.01)
    for address in ("d0", "d1"):
        report(registry, address, num_running=1, num_context_tokens=100, serial=serial)
    for now in range(40, 58):
        for worker in registry.workers.values():
            worker.life.last_seen = float(now)
        registry.sweep(float(now))
    assert registry.workers["d0"].estimates.other_routers < 0.1, "it is alone again"


ROWS_ONLY = {"model": StepModel(fixed_s=5e-3, row_s=1e-4, num_steps=100)}


def test_a_next_turn_is_computed_where_the_answer_before_it_is_cached():
    """1,000 tokens of the first turn and its answer, then 100 new ones: the prefill worker has only the prompt."""
    registry = reported()
    assert names(choose(registry, num_tokens=1100, hits={"p0": 496, "d1": 992})) == (None, "d1")
    assert names(choose(registry, num_tokens=1100, hits={"p0": 992, "d1": 992}))[0] == "p0", "both have all"
    busy = {"waiting_s": 1.0}
    assert names(choose(reported(d1=busy), num_tokens=1100, hits={"p0": 496, "d1": 992}))[0] == "p0"


def test_a_decode_worker_that_computed_no_prompt_computes_a_next_turn():
    registry = reported(d0=ROWS_ONLY, d1=ROWS_ONLY)
    assert names(choose(registry, num_tokens=1100, hits={"p0": 496, "d1": 992})) == (None, "d1")
    assert names(choose(registry, num_tokens=1100, hits={"p0": 496, "d1": 496}))[0] == "p0", "it holds no more"
    assert names(choose(registry, num_tokens=1900, hits={"p0": 496, "d1": 992}))[0] == "p0", "it may be slow at it"
    assert names(choose(registry, num_tokens=1100, hits={"d1": 992}, policy=REMOTE))[0] == "p0", "the user forbids it"


def test_a_forecast_has_every_term():
    crowd = {"num_running": 4, "num_context_tokens": 4000}
    registry = reported(p0={"waiting_s": 0.3}, p1={"waiting_s": 0.3}, d0=crowd, d1=crowd)
    forecast = choose(registry, num_tokens=1000).forecast
    assert forecast.is_known
    assert forecast.wait_s == pytest.approx(0.3)
    assert forecast.prompt_s == pytest.approx(0.1 + 2e-3)  # two steps
    assert forecast.ttft_s == pytest.approx(0.402)
    assert forecast.place_s == 0.0
    assert forecast.token_s == pytest.approx(1e-3 + 5e-4 + 5100e-8, rel=0.02)
    assert forecast.delay_s > 4 * 1e-4


# ---------------------------------------------------------------- what models of links predict


def linked(byte_s: float, **fields):
    """What a decode worker reports that got a hundred transfers over TCP, in blocks of 1 MB."""
    link = LinkModel(latency_s=1e-3, byte_s=byte_s, block_bytes=10**6, num_transfers=100)
    return {"links": Links(tcp=link), **fields}


def test_an_answer_goes_where_its_kv_arrives_sooner():
    assert choose(reported(d0=linked(1e-7), d1=linked(1e-9))).decode.address == "d1"
    assert choose(reported(d0=linked(1e-9), d1=linked(1e-7))).decode.address == "d0"
    held = choose(reported(d0=linked(2e-8), d1=linked(1e-8)), hits={"d0": 400}, policy=REMOTE)
    assert held.decode.address == "d0", "what it holds need not come"


def test_a_prompt_is_computed_where_its_answer_is_made_when_the_link_is_slow():
    slow, fast = (reported(d0=linked(byte_s), d1=linked(byte_s)) for byte_s in (1e-6, 1e-9))
    assert choose(slow, num_tokens=1000).prefill is None
    assert choose(fast, num_tokens=1000).prefill is not None


def test_a_new_worker_has_the_link_of_its_pool():
    registry = pool()
    report(registry, "d0", **linked(1e-7))
    report(registry, "d1")
    assert registry.workers["d1"].load.likely_link == registry.workers["d0"].load.likely_link
    assert not registry.workers["p0"].load.likely_link.is_known


def test_prefill_hides_most_of_a_transfer():
    choice = choose(reported(d0=linked(1e-9), d1=linked(1e-9)), num_tokens=1000)
    alone_s = forecast_decode(choice.decode, RequestShape(1000, 100, {})).transfer_s
    assert alone_s == pytest.approx(0.066)
    assert choice.forecast.prompt_s > 0.09 and choice.forecast.transfer_s == pytest.approx(0.002 + 0.1 * 0.064)


# ---------------------------------------------------------------- goals

CROWD = {"num_running": 7, "num_context_tokens": 7000, "step_tokens": 256}


def choose_for(registry, ttft_s=0.5, tpot_s=0.05, num_tokens=1000, policy=POLICY):
    """The choice for a prompt, which takes 0.1 s, with goals."""
    shape = RequestShape(num_tokens, 100, {}, num_expected=100, ttft_s=ttft_s, tpot_s=tpot_s)
    return policy.choose(registry.ready("prefill"), registry.ready("decode"), shape, 0.0)


def test_a_prompt_that_would_be_late_is_computed_where_tokens_can_wait():
    busy = {"waiting_s": 0.45}
    registry = reported(p0=busy, p1=busy, d0=CROWD, d1=CROWD)
    assert choose_for(registry, ttft_s=0.0, tpot_s=0.0).prefill is not None, "seven streams lose more than it gains"
    choice = choose_for(registry)
    assert names(choice) == (None, "d0")
    assert choice.forecast.ttft_s < 0.45 and choice.forecast.delay_s > 0, "what others lose is still told"
    assert choose_for(registry, policy=REMOTE).prefill is not None, "the user forbids it"


def test_tokens_without_a_goal_or_about_to_miss_it_do_not_wait():
    busy = {"waiting_s": 0.45}
    registry = reported(p0=busy, p1=busy, d0=CROWD, d1=CROWD)
    assert choose_for(registry, tpot_s=0.0).prefill is not None
    assert choose_for(registry, tpot_s=1e-4).prefill is not None


def test_a_worker_with_few_spare_blocks_or_a_queue_is_no_place_for_a_late_prompt():
    busy = {"waiting_s": 0.45}
    for crowd in (CROWD | {"num_free_blocks": 400}, CROWD | {"num_waiting": 1}):
        assert choose_for(reported(p0=busy, p1=busy, d0=crowd, d1=crowd)).prefill is not None
        assert names(choose_for(reported(p0=busy, p1=busy, d0=crowd, d1=CROWD))) == (None, "d1")


def test_a_worker_whose_chunks_are_too_large_for_the_goal_is_no_place_for_a_late_prompt():
    busy, large = {"waiting_s": 0.45}, CROWD | {"step_tokens": 1000}
    assert choose_for(reported(p0=busy, p1=busy, d0=large, d1=large)).prefill is not None
    assert names(choose_for(reported(p0=busy, p1=busy, d0=large, d1=CROWD))) == (None, "d1")
    alone = {"step_tokens": 1000}
    assert choose_for(reported(p0=busy, p1=busy, d0=alone, d1=alone)).prefill is None, "there is no one to wait"


def test_a_prompt_in_time_stays_with_the_prefill_workers():
    registry = reported(p0={"waiting_s": 0.1}, p1={"waiting_s": 0.1}, d0=CROWD, d1=CROWD)
    assert names(choose_for(registry)) == ("p0", "d0")


def test_a_late_prompt_stays_where_decode_workers_are_no_sooner():
    busy, busier = {"waiting_s": 0.45}, {"waiting_s": 0.5, "num_waiting_tokens": 5000}
    assert choose_for(reported(p0=busy, p1=busy, d0=CROWD | busier, d1=CROWD | busier)).prefill is not None


def test_of_decode_workers_the_one_is_taken_that_computes_a_late_prompt_first():
    busy, behind = {"waiting_s": 0.45}, {"waiting_s": 0.2, "num_waiting_tokens": 2000}
    assert names(choose_for(reported(p0=busy, p1=busy, d0=CROWD | behind, d1=CROWD))) == (None, "d1")


def test_a_late_prompt_goes_to_a_decode_worker_that_has_computed_none_yet():
    """It is taken for one that is twice as slow as the prefill worker."""
    busy, rows_only = {"waiting_s": 0.45}, {"model": StepModel(fixed_s=1e-3, row_s=1e-4, num_steps=100)}
    registry = reported(p0=busy, p1=busy, d0=rows_only, d1=rows_only)
    assert names(choose_for(registry)) == (None, "d0")
    assert choose_for(registry, num_tokens=5000).prefill is not None, "1 s there, 0.95 s with its wait here"
    few = rows_only | {"num_free_blocks": 400}
    registry = reported(p0={"waiting_s": 5.0}, p1={"waiting_s": 5.0}, d0=few, d1=few)
    assert names(choose_for(registry)) == (None, "d0"), "it costs less there, although few blocks are spare"
    assert choose_for(registry, tpot_s=0.0).prefill is not None, "nothing limits its chunks"


def test_a_short_prompt_does_not_wait_for_a_place_in_a_full_batch():
    full = {"num_running": 8, "num_waiting": 2, "num_context_tokens": 8000}
    registry = reported(d0=full, d1=full)
    for address in ("d0", "d1"):
        registry.on_request_finished(address, 2.0)
    assert names(choose_for(registry, ttft_s=0.0, tpot_s=0.0, num_tokens=60)) == (None, "d0")
    assert names(choose_for(registry, num_tokens=60)) == ("p0", "d0"), "a prefill worker has its first token at once"
