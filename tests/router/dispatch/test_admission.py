import pytest

from diptych.common.messages import WorkerHeartbeat, WorkerHello
from diptych.router.dispatch.admission import MAX_RETRY_AFTER_S, observed_waits_s, predicted_wait_s, refusal
from diptych.router.dispatch.registry import WorkerRegistry


def worker(role: str = "prefill", *, service_s: float = 0.0, **beat: object):
    """A ready worker with 100 blocks of 16 tokens and 4 places."""
    registry = WorkerRegistry(["tcp://p:1"], ["tcp://d:1"], worker_timeout_s=1.0)
    address = f"tcp://{role[0]}:1"
    hello = WorkerHello(
        worker_id=role, role=role, epoch=1, fingerprint="f", model="m", block_size=16, num_blocks=100,
        max_model_len=512, max_num_seqs=4,
    )  # fmt: skip
    names = ("num_running", "num_waiting", "num_transferring", "num_waiting_tokens", "num_cached_blocks")
    values = dict.fromkeys(names, 0) | {"num_free_blocks": 100, "num_owned_blocks": 0} | beat
    registry.on_hello(address, hello, 0.0)
    registry.on_heartbeat(
        address, WorkerHeartbeat(worker_id=role, epoch=1, step=1, ready=True, draining=False, **values), 0.0
    )
    if service_s:
        registry.on_request_finished(address, service_s)
    return registry.workers[address]


def decode(**fields):
    return worker("decode", **fields)


def test_a_prompt_waits_for_those_before_it():
    busy = worker(num_waiting_tokens=10_000, full_tokens_per_s=1000.0)
    assert predicted_wait_s([busy], [decode()]) == pytest.approx(10.0)


def test_the_best_worker_counts():
    busy = worker(num_waiting_tokens=10_000, full_tokens_per_s=1000.0)
    assert predicted_wait_s([busy, worker(full_tokens_per_s=1000.0)], [decode()]) == 0


def test_a_rate_that_nobody_has_seen_refuses_nobody():
    assert predicted_wait_s([worker(num_waiting_tokens=10**9, tokens_per_s=1.0)], [decode()]) == 0


def test_without_prefill_workers_decode_workers_compute_the_prompts():
    assert predicted_wait_s([], [decode(num_waiting_tokens=500, full_tokens_per_s=100.0)]) == pytest.approx(5.0)


def test_a_full_batch_makes_wait_by_littles_law():
    assert predicted_wait_s([], [decode(num_running=3, service_s=8.0)]) == 0
    full = decode(num_running=4, num_waiting=7, service_s=8.0)
    assert predicted_wait_s([], [full]) == pytest.approx(8 * 8.0 / 4)


def test_without_blocks_to_give_only_those_that_run_are_places():
    full = decode(num_running=2, num_waiting=3, num_free_blocks=1, num_owned_blocks=99, service_s=8.0)
    assert predicted_wait_s([], [full]) == pytest.approx(4 * 8.0 / 2)


def test_nobody_ready_is_another_matter():
    assert predicted_wait_s([], []) == 0


def test_waiting_as_long_as_allowed_is_allowed():
    assert refusal(30.0, max_wait_s=30.0) is None


def test_a_refusal_says_when_to_come_back():
    error = refusal(42.0, max_wait_s=30.0)
    assert error is not None
    assert (error.status, error.retry_after_s) == (429, pytest.approx(12.0))
    assert "42.0 s" in error.message
    assert "30 s" in error.message
    late = refusal(1e6, max_wait_s=30.0)
    assert late is not None
    assert late.retry_after_s == MAX_RETRY_AFTER_S


def test_an_slo_refuses_earlier_and_by_a_margin():
    assert refusal(0.7, max_wait_s=30.0, slo_ttft_s=0.5) is None
    assert refusal(0.8, max_wait_s=30.0, slo_ttft_s=0.5) is not None
    assert refusal(31.0, max_wait_s=30.0, slo_ttft_s=100.0) is not None


def test_those_who_wait_already_tell_what_no_rate_told():
    few = [("tcp://p:1", wait_s) for wait_s in (60.0, 50.0, 40.0)]
    assert observed_waits_s(few) == {}, "a few long prompts"
    many = [*few, ("tcp://p:1", 30.0), ("tcp://p:1", 1.0), ("tcp://q:1", 99.0)]
    assert observed_waits_s(many) == {"tcp://p:1": 30.0}
    assert predicted_wait_s([worker()], [decode()], observed_waits_s(many)) == 30.0


def test_one_worker_that_does_not_get_on_keeps_nobody_from_the_others():
    assert predicted_wait_s([worker(), worker("decode")], [decode()], {"tcp://p:1": 30.0}) == 0
