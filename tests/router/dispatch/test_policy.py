from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.wire.messages import WorkerHello
from router.dispatch.policy import RequestShape, RoutingPolicy
from router.fleet.registry import WorkerRegistry
from router.fleet.worker import WorkerState

POLICY = RoutingPolicy(local_prefill_threshold=64)


def pool(prefill=2, decode=2, *, fingerprints=None, num_blocks=1000):
    """A registry of ready workers named p0, p1, ..., d0, d1, ..."""
    registry = WorkerRegistry([f"p{i}" for i in range(prefill)], [f"d{i}" for i in range(decode)], worker_timeout_s=2.0)
    for address, worker in registry.workers.items():
        hello = WorkerHello(
            worker_id=address, role=worker.role, epoch=1, fingerprint=(fingerprints or {}).get(address, "f"), model="m",
            block_size=16, num_blocks=num_blocks, max_model_len=4096, max_num_seqs=8,
        )  # fmt: skip
        registry.on_hello(address, hello, 0.0)
        worker.state = WorkerState.READY
    return registry


def choose(registry, num_tokens=500, num_remaining=100, hits=None, policy=POLICY):
    shape = RequestShape(num_tokens, num_remaining, hits or {})
    return policy.choose(registry.ready("prefill"), registry.ready("decode"), shape)


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
    assert names(POLICY.choose(registry.ready("prefill"), registry.ready("decode"), shape)) == (None, "d0")
    shape = RequestShape(500, 1, {}, alone=True)
    assert names(POLICY.choose(registry.ready("prefill"), registry.ready("decode"), shape)) == ("p0", None)


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
    registry.book("p0", num_tokens=300, num_blocks=0)
    assert choose(registry).prefill.address == "p1"
    assert choose(registry, hits={"p0": 200}).prefill.address == "p1"
    assert choose(registry, hits={"p0": 400}).prefill.address == "p0"


def test_decode_goes_where_a_hit_is_but_not_to_a_busy_worker():
    registry = pool()
    assert choose(registry, hits={"d1": 400}).decode.address == "d1"
    for _ in range(5):
        registry.book("d1", num_tokens=0, num_blocks=1)
    assert choose(registry, hits={"d1": 400}).decode.address == "d0"


def test_decode_without_room_comes_last():
    registry = pool()
    registry.book("d0", num_tokens=0, num_blocks=980)
    for _ in range(6):
        registry.book("d1", num_tokens=0, num_blocks=1)
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
        registry.release(registry.book(decode.address, num_tokens=0, num_blocks=1))
    assert picks == {"d0": 10, "d1": 10, "d2": 10}


@pytest.mark.parametrize("prefill", [0, 2])
def test_one_shared_system_prompt_does_not_pin_all_traffic(prefill):
    registry, held, picks = pool(prefill=prefill, decode=4), {}, Counter()
    for _ in range(40):
        choice = choose(registry, num_tokens=1100, hits=held, policy=RoutingPolicy(local_prefill_threshold=0))
        for worker in filter(None, (choice.decode, choice.prefill)):
            computes = worker is choice.prefill or choice.local
            num_tokens = 1100 - held.get(worker.address, 0) if computes else 0
            registry.book(worker.address, num_tokens=num_tokens, num_blocks=10)
            held[worker.address] = 1024
            picks[worker.address] += 1
    assert max(picks[f"d{i}"] for i in range(4)) - min(picks[f"d{i}"] for i in range(4)) <= 5


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 2000)), max_size=30), st.integers(1, 3000), st.integers(1, 50)
)
def test_a_choice_is_sound_and_a_function_of_state(bookings, num_tokens, num_remaining):
    registry = pool(prefill=2, decode=3, fingerprints={"p1": "g", "d2": "g"})
    for worker, tokens in bookings:
        registry.book(("p0", "p1", "d0", "d1", "d2")[worker], num_tokens=tokens, num_blocks=tokens // 16)
    choice = choose(registry, num_tokens, num_remaining)
    assert names(choice) == names(choose(registry, num_tokens, num_remaining))
    if choice.prefill and choice.decode:
        assert choice.prefill.identity.fingerprint == choice.decode.identity.fingerprint
    assert (choice.decode is None) == (num_remaining == 1)
    assert choice.local == (num_remaining > 1 and num_tokens <= POLICY.local_prefill_threshold)
