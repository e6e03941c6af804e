"""Out of many workers, those that are worth a look are weighed."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from common.latency.step_model import StepModel, StepShape
from router.fleet.prefix_index import PrefixIndex
from router.fleet.registry import WorkerRegistry
from router.fleet.worker import Worker
from router.policy.request_shape import RequestShape
from router.policy.routing import RoutingPolicy
from router.policy.shortlist import NUM_CHEAP, NUM_HOLDERS, SHORTLIST_ABOVE, Shortlist

from ...fake_worker import heartbeat_of, hello_of

MODEL = StepModel(fixed_s=5e-3, token_s=4e-5, row_s=1e-4, context_s=3e-8, error=0.02, num_steps=1000)
SHAPE = RequestShape(2000, 200, {})


class Rig:
    """One router's view of `num` prefill and `num` decode workers."""

    def __init__(self, num: int = 60, router_id: str = "r") -> None:
        self.registry = WorkerRegistry(
            [f"p{i}" for i in range(num)], [f"d{i}" for i in range(num)], worker_timeout_s=1.0, router_id=router_id
        )
        self.policy, self.index = RoutingPolicy(), PrefixIndex()
        self.shortlist = Shortlist(self.registry, self.index)
        for address in self.registry.workers:
            self.report(address)

    def report(
        self,
        address: str,
        *,
        fingerprint: str = "f",
        max_model_len: int = 32_768,
        role: str = "",
        epoch: int = 1,
        **beat: object,
    ) -> None:
        worker = self.registry.workers[address]
        hello = hello_of(
            address, role or worker.role, epoch=epoch, fingerprint=fingerprint, block_size=16, num_blocks=20_000,
            max_model_len=max_model_len, max_num_seqs=256, max_step_tokens=2048, home=worker.home,
        )  # fmt: skip
        self.registry.on_hello(address, hello, 0.0)
        values = {"epoch": epoch, "num_free_blocks": 20_000, "step_model": MODEL} | beat
        self.registry.on_heartbeat(address, heartbeat_of(address, **values), 0.0)

    def names(self, role: str = "decode", hits: list[bytes] | None = None) -> list[str]:
        found = {16: self.index.hits(hits)} if hits else {}
        return [worker.address for worker in self.shortlist.workers(role, lambda worker: True, found)]  # type: ignore[arg-type]

    def choose(self) -> tuple[Worker, Worker]:
        choice = self.policy.choose(self.shortlist.ready("prefill"), self.shortlist.ready("decode"), SHAPE, 0.0)
        assert choice is not None and choice.prefill is not None and choice.decode is not None
        return choice.prefill, choice.decode


def test_few_workers_are_all_weighed() -> None:
    rig = Rig(SHORTLIST_ABOVE // 2)
    assert not rig.shortlist.is_needed and len(rig.shortlist.ready("decode")) == SHORTLIST_ABOVE // 2


def test_of_many_workers_few_are_weighed() -> None:
    rig = Rig()
    assert rig.shortlist.is_needed
    for role in ("prefill", "decode"):
        names = rig.names(role)
        assert len(names) == len(set(names)) == NUM_CHEAP and {name[0] for name in names} == {role[0]}


def test_a_worker_that_is_clearly_better_is_always_among_them() -> None:
    rig = Rig()
    for address in rig.registry.workers:
        rig.report(address, num_running=30, num_context_tokens=60_000, waiting_s=0.5)
    rig.report("d7")
    rig.report("p9")
    assert all("d7" in rig.names("decode") and "p9" in rig.names("prefill") for _ in range(20))


def test_the_ranking_follows_reports_and_bookings() -> None:
    rig = Rig()
    rig.names()
    for address in rig.registry.workers:
        if address != "p3":
            rig.report(address, waiting_s=0.2)
    assert all("p3" in rig.names("prefill") for _ in range(10))
    prompt = StepShape.of_prompt(0, 2_000)
    bookings = [rig.registry.book("p3", 0.0, prompt=prompt, num_blocks=10) for _ in range(100)]
    assert not any("p3" in rig.names("prefill") for _ in range(10))
    for booking in bookings:
        rig.registry.release(booking)
    assert all("p3" in rig.names("prefill") for _ in range(10))


@pytest.mark.parametrize("end", ["cut", "drain", "withhold", "remove", "silence"])
def test_a_worker_that_is_not_ready_is_not_weighed(end: str) -> None:
    rig = Rig()
    for address in rig.registry.workers:
        if address != "d5":
            rig.report(address, num_running=30, num_context_tokens=90_000)
    assert "d5" in rig.names()
    if end == "cut":
        rig.registry.on_cut("d5")
    elif end == "drain":
        rig.report("d5", draining=True)
    elif end == "withhold":
        rig.registry.withhold("d5", "is leaving")
    elif end == "remove":
        rig.registry.remove("d5")
    else:
        for address, worker in rig.registry.workers.items():
            worker.life.last_seen = 0.0 if address == "d5" else 5.0
        rig.registry.sweep(5.0)
    assert not any("d5" in rig.names() for _ in range(10))
    if end in ("cut", "drain"):
        rig.report("d5")
        assert "d5" in rig.names(), "it is back"


def test_a_worker_that_changes_its_role_is_weighed_in_the_new_one_alone() -> None:
    rig = Rig()
    for address in rig.registry.workers:
        if address != "d5":
            rig.report(address, num_running=30, num_context_tokens=90_000, waiting_s=0.2)
    assert "d5" in rig.names()
    rig.report("d5", role="prefill", epoch=2)
    assert "d5" in rig.names("prefill") and not any("d5" in rig.names() for _ in range(10))
    rig.report("d5", role="decode", epoch=3)
    assert "d5" in rig.names() and not any("d5" in rig.names("prefill") for _ in range(10))


@pytest.mark.parametrize("num_holders", [1, 3, 20, 50])
def test_holders_of_a_prefix_are_weighed_however_busy(num_holders: int) -> None:
    rig = Rig()
    chain = [bytes([n]) * 8 for n in range(8)]
    for number in range(num_holders):
        rig.index.store(f"d{number}", chain[:4])
        rig.report(f"d{number}", num_running=50, num_context_tokens=100_000)
    rig.index.store("d59", chain)
    rig.report("d59", num_running=90, num_context_tokens=200_000)
    names = rig.names("decode", chain)
    assert "d59" in names, "it holds more than the others"
    assert sum(int(name[1:]) < num_holders for name in names) >= min(num_holders, NUM_HOLDERS - 1)


def test_each_layout_has_workers_on_the_list() -> None:
    rig = Rig()
    for number in range(4):
        rig.report(f"d{number}", fingerprint="g", num_running=90, num_context_tokens=200_000)
    assert {f"d{number}" for number in range(4)} < set(rig.names())


def test_only_accepted_workers_are_weighed() -> None:
    rig = Rig()
    rig.report("d0", max_model_len=100_000, num_running=90, num_context_tokens=200_000)
    long = rig.shortlist.workers("decode", lambda worker: worker.identity.max_model_len > 50_000, {})
    assert [worker.address for worker in long] == ["d0"]
    assert rig.shortlist.workers("decode", lambda worker: worker.role == "prefill", {}) == []


def test_a_pool_without_a_ready_worker() -> None:
    rig = Rig()
    assert rig.shortlist.has_ready("decode")
    for number in range(60):
        rig.registry.on_cut(f"d{number}")
    assert not rig.shortlist.has_ready("decode") and rig.shortlist.has_ready("prefill")
    assert rig.shortlist.ready("decode") == []


def test_all_are_weighed_again_once_few_are_left_and_the_list_when_they_come_back() -> None:
    rig = Rig(20)
    rig.names()
    for number in range(10):
        rig.registry.remove(f"p{number}")
    assert not rig.shortlist.is_needed and len(rig.shortlist.ready("prefill")) == 10
    for number in range(10):
        rig.registry.add(f"p{number}", "prefill")
        rig.report(f"p{number}")
    assert rig.shortlist.is_needed and len(rig.shortlist.workers("prefill", lambda worker: True, {})) == NUM_CHEAP
    assert {name for _ in range(30) for name in rig.names("prefill")} >= {"p0", "p19"}


def test_a_choice_from_the_list_costs_hardly_more_than_the_best_of_all() -> None:
    rig, rng = Rig(200), random.Random(1)
    for address in rig.registry.workers:
        num_running = rng.randrange(100)
        rig.report(address, num_running=num_running, num_context_tokens=1000 * num_running, waiting_s=2 * rng.random())
    ready = [rig.registry.ready(role) for role in ("prefill", "decode")]
    best = rig.policy.choose(*ready, SHAPE, 0.0)
    assert best is not None
    for _ in range(20):
        listed = [rig.shortlist.ready(role) for role in ("prefill", "decode")]
        choice = rig.policy.choose(*listed, SHAPE, 0.0)
        assert choice is not None
        assert choice.forecast.ttft_s <= 1.1 * best.forecast.ttft_s + 0.02
        assert choice.forecast.token_s <= 1.25 * best.forecast.token_s


def most_for_one(router_ids: list[str], num_workers: int, num_requests: int) -> int:
    """How many requests the busiest worker gets when routers place that many each between two heartbeats."""
    picks: Counter[str] = Counter()
    for router_id in router_ids:
        rig = Rig(num_workers, router_id)
        for _ in range(num_requests):
            for worker in rig.choose():
                rig.registry.book(worker.address, 0.0, prompt=StepShape(), num_blocks=100)
                picks[worker.address] += 1
    return max(picks.values())


@pytest.mark.parametrize("num_workers", [8, 100])
def test_routers_that_hear_the_same_do_not_all_choose_the_same_workers(num_workers: int) -> None:
    routers = [f"router-{number}" for number in range(8)]
    assert most_for_one([""] * 8, 8, 2) == 8, "without ids they do"
    assert most_for_one(routers, num_workers, 2) <= 5
