"""Prompts that a worker could read from its disk, or pull from a peer."""

from __future__ import annotations

from typing import Any

import pytest

from common.blocks.block_hash import block_hashes
from common.latency.link_model import LinkModel, Links
from common.latency.step_model import StepModel
from common.wire.messages import SHORT_HASH_BYTES
from common.wire.sampling_params import SamplingParams
from router.dispatch.client import GenerationRequest
from router.dispatch.fetches import FetchPlanner
from router.dispatch.placement import decode_request, prefill_request
from router.dispatch.request_state import RequestState
from router.fleet.prefix_index import PrefixIndex
from router.fleet.registry import WorkerRegistry
from router.fleet.worker import WorkerState
from router.policy.forecast import forecast_decode, forecast_local, forecast_prefill
from router.policy.request_shape import Fetch, RequestShape
from router.policy.routing import RoutingPolicy

from ...fake_worker import heartbeat_of, hello_of

REMOTE = RoutingPolicy(local_prefill_threshold=0)

DISK = LinkModel(latency_s=1e-3, byte_s=1e-9, block_bytes=10**6, num_transfers=9)
PEER = LinkModel(latency_s=2e-3, byte_s=1e-9, block_bytes=10**6, num_transfers=9)
PROMPT = list(range(1000))
HASHES = block_hashes(PROMPT, 16)
SLOW = StepModel(fixed_s=1e-3, token_s=1e-3, num_steps=100)
"""A second for the whole prompt."""


class Fleet:
    """Ready workers p0, p1, p2 and d0, of which `p0` and others may be told what they hold and report."""

    def __init__(self, **beats: dict[str, Any]) -> None:
        self.registry = WorkerRegistry(["p0", "p1", "p2"], ["d0"], worker_timeout_s=2.0)
        self.index = PrefixIndex()
        self.fetches = FetchPlanner(self.registry, self.index)
        for address in self.registry.workers:
            self.say(address, **beats.get(address, {}))

    def say(self, address: str, lends: bool = True, fingerprint: str = "f", **beat: Any) -> None:
        worker = self.registry.workers[address]
        lend_address = f"tcp://{address}:7004" if lends else ""
        layout = {"block_size": 16, "num_blocks": 1000, "max_num_seqs": 8, "fingerprint": fingerprint}
        self.registry.on_hello(address, hello_of(address, worker.role, lend_address=lend_address, **layout), 0.0)
        values = {"step_model": SLOW, "links": Links(peer=PEER)} | beat
        self.registry.on_heartbeat(address, heartbeat_of(address, **values), 0.0)
        worker.state = WorkerState.READY

    def hold(self, address: str, num_blocks: int, below: int = 0) -> None:
        shorts = [digest[:SHORT_HASH_BYTES] for digest in HASHES[: num_blocks + below]]
        self.index.store(address, shorts[:num_blocks])
        self.index.store_below(address, shorts[num_blocks:])

    def state(self) -> RequestState:
        params = SamplingParams(max_tokens=50)
        return RequestState(GenerationRequest("r", PROMPT, params), 0.0)

    def of(self, *addresses: str, now: float = 0.0) -> dict[str, Fetch]:
        workers = [self.registry.workers[address] for address in addresses or self.registry.workers]
        hits = {16: self.index.hits(HASHES)}
        return dict(self.fetches.plan(self.state(), workers, hits, now))

    def chosen(self) -> str:
        """The prefill worker of a request."""
        ready = self.registry.ready("prefill"), self.registry.ready("decode")
        choice = REMOTE.choose(*ready, self.shape(), 0.0)
        assert choice is not None and choice.prefill is not None
        return choice.prefill.address

    def shape(self, now: float = 0.0) -> RequestShape:
        held = self.index.hits(HASHES)
        hits = {address: 16 * held.num_blocks(address) for address in self.registry.workers}
        return RequestShape(len(PROMPT), 50, hits, fetches=self.of(now=now))


def test_a_worker_pulls_what_another_holds() -> None:
    fleet = Fleet()
    fleet.hold("p0", 60)
    fleet.hold("p1", 10)
    found = fleet.of()
    assert set(found) == {"p1", "p2", "d0"}, "the holder needs none"
    pull = found["p1"]
    assert pull.end == 960 and pull.seconds == pytest.approx(2e-3 + 50e-3)
    assert pull.peer is not None and (pull.peer.worker_id, pull.peer.num_blocks) == ("p0", 60)
    assert pull.peer.address == "tcp://p0:7004"
    forecast = forecast_prefill(fleet.registry.workers["p1"], fleet.shape(), 0.0)
    assert forecast.fetch_s == pull.seconds and forecast.prompt_s == pytest.approx(pull.seconds + 0.04, abs=0.005)


def test_the_workers_are_told_what_the_forecast_counted() -> None:
    fleet = Fleet()
    fleet.hold("p0", 60)
    state, fetch = fleet.state(), fleet.of()["p1"]
    request = prefill_request(state, fleet.registry.workers["d0"], 0.0, serial=1, fetch=fetch)
    assert request.peer == fetch.peer
    assert decode_request(state, None, 0.0, serial=1, fetch=fetch).peer == fetch.peer
    worker, shape = fleet.registry.workers["d0"], fleet.shape()
    there = forecast_local(worker, shape, forecast_decode(worker, shape), 0.0)
    assert there.fetch_s == shape.fetch_s(worker) > 0


def test_a_busy_holder_s_prompts_go_elsewhere_and_others_do_not_herd() -> None:
    """The holder is taken while its queue is short; then others pull, and each pull makes the next one dearer."""
    fleet = Fleet(p0={"waiting_s": 0.02})
    fleet.hold("p0", 60)
    assert fleet.chosen() == "p0"
    fleet.say("p0", waiting_s=0.5)
    assert fleet.chosen() in ("p1", "p2")
    first = fleet.of()["p1"]
    fleet.fetches.begin(first, 0.0)
    assert fleet.of()["p1"].seconds == pytest.approx(2 * first.seconds)
    for _ in range(20):
        fleet.fetches.begin(first, 0.0)
    assert not fleet.of(), "its queue takes longer than computing"
    assert fleet.of(now=2.0)["p1"].seconds == first.seconds


def test_the_least_busy_of_two_holders_lends() -> None:
    fleet = Fleet()
    fleet.hold("p0", 60)
    fleet.hold("p1", 60)
    first = fleet.of()["p2"]
    fleet.fetches.begin(first, 0.0)
    assert {first.lender, fleet.of()["p2"].lender} == {"p0", "p1"}


@pytest.mark.parametrize(
    "holder",
    [
        {"lends": False},
        {"fingerprint": "another"},
    ],
)
def test_some_lend_nothing(holder: dict[str, Any]) -> None:
    fleet = Fleet(p0=holder)
    fleet.hold("p0", 60)
    assert not fleet.of()


def test_a_dead_or_suspect_worker_lends_nothing_and_a_draining_one_does() -> None:
    fleet = Fleet()
    fleet.hold("p0", 60)
    worker = fleet.registry.workers["p0"]
    worker.state = WorkerState.DRAINING
    assert fleet.of("p1")
    worker.state = WorkerState.DEAD
    assert not fleet.of("p1")
    worker.state, worker.life.suspect = WorkerState.READY, True
    assert not fleet.of("p1")


def test_what_is_only_expected_cannot_be_lent() -> None:
    fleet = Fleet()
    fleet.index.expect("p0", HASHES[:60], 0.0)
    assert not fleet.of("p1")
    fleet.hold("p0", 20)
    assert fleet.of("p1")["p1"].end == 320


def test_a_worker_that_takes_none_and_a_slow_link_are_no_places_for_pulls() -> None:
    slow = LinkModel(byte_s=2e-6, block_bytes=10**6, num_transfers=9)
    fleet = Fleet(p1={"links": Links(peer=slow)}, p2={"lends": False})
    fleet.hold("p0", 60)
    assert set(fleet.of()) == {"d0"}


def test_blocks_on_a_peer_s_disk_take_its_reads_as_well() -> None:
    fleet = Fleet(p0={"links": Links(peer=PEER, disk=DISK)})
    fleet.hold("p0", 20, below=40)
    assert fleet.of("p1")["p1"].seconds == pytest.approx(2e-3 + 60e-3 + 1e-3 + 40e-3)


def test_the_way_that_saves_more_is_taken() -> None:
    fleet = Fleet(p1={"links": Links(peer=PEER, disk=DISK)})
    fleet.hold("p0", 60)
    fleet.hold("p1", 0, below=60)
    assert fleet.of("p1")["p1"].peer is None, "its own disk is faster, and has all"
    other = Fleet(p1={"links": Links(peer=PEER, disk=DISK)})
    other.hold("p0", 60)
    other.hold("p1", 0, below=20)
    assert other.of("p1")["p1"].peer is not None


def test_a_prompt_goes_where_it_can_be_read_unless_it_is_in_memory_elsewhere() -> None:
    fleet = Fleet(p0={"links": Links(disk=DISK), "lends": False}, p1={"lends": False}, p2={"lends": False})
    fleet.hold("p0", 0, below=30)
    read = fleet.of("p0", "p1")
    assert set(read) == {"p0"}, "the other has no disk"
    assert read["p0"].end == 480 and read["p0"].seconds == pytest.approx(1e-3 + 30e-3)
    assert fleet.chosen() == "p0"
    fleet.hold("p1", 30)
    assert fleet.chosen() == "p1"


def test_what_is_read_more_slowly_than_computed_is_no_reason() -> None:
    slow = LinkModel(byte_s=2e-6, block_bytes=10**6, num_transfers=9)
    fleet = Fleet(p0={"links": Links(disk=slow), "lends": False})
    fleet.hold("p0", 0, below=30)
    assert not fleet.of("p0")
