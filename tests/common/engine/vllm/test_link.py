from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from msgspec.structs import replace

from common.engine.vllm import link as links
from common.engine.vllm.layout import KVGroup
from common.engine.vllm.link import (
    SCHEDULER,
    Admit,
    Announced,
    Arrived,
    Cancel,
    ConnectorSettings,
    Done,
    Expect,
    Forget,
    FromRank,
    Load,
    RankFailed,
    RankLink,
    RankReady,
    Send,
    Sent,
    StepsDone,
    TransferLost,
    TransferParams,
    WorkerLink,
    joined_addresses,
    split_addresses,
)
from common.errors import ConfigError
from common.latency import StepShape
from common.wire.curve import Curve, KeyPair, write_key_pair
from common.wire.gatekeeper import Gatekeeper
from common.wire.messages import KVDone, KVTarget

from ....waiting import until

DONE = KVDone(request_id="a", attempt=1, first_token=7)
GROUPS = (KVGroup("full", 16, 2, 100), KVGroup("window", 16, 2, 100, window=64))
READY = RankReady(rank=0, world_size=1, kv_address="tcp://h:1", layout="l", groups=GROUPS, num_slots=4)
STEP = StepsDone(
    steps=((StepShape(1, 1, 0, 0), 0.1),), num_running=1, num_waiting=0, num_waiting_tokens=0,
    num_context_tokens=0, num_free_blocks=1, num_total_blocks=2,
)  # fmt: skip
ORDERS = (
    Expect(request_id="a", attempt=1, num_tokens=300, first_block=1),
    Admit(request_id="a", attempt=1),
    Forget(request_id="a", attempt=1, reason="aborted"),
    Done(request_id="a", attempt=1, done=DONE),
    Cancel(request_id="a", attempt=1, reason="aborted", phase="prefill"),
)
EVENTS = (
    READY,
    Announced(request_id="a", attempt=1),
    Arrived(request_id="a", attempt=1, done=DONE, num_bytes=5, transfer_s=0.5, busy_s=0.1, transport="shm"),
    TransferLost(request_id="a", attempt=1, reason="lost"),
    Sent(request_id="a", attempt=1, reason="", num_bytes=5, transport="tcp"),
    RankFailed(reason="IndexError"),
)


@dataclass
class Rig:
    link: RankLink
    got: list[tuple[int, FromRank]]
    settings: ConnectorSettings
    context: zmq.Context[zmq.Socket[bytes]]
    ends: list[WorkerLink] = field(default_factory=list)
    orphaned: list[str] = field(default_factory=list)

    def end(self, rank: int, got: list[object] | None = None, **settings: object) -> WorkerLink:
        made = WorkerLink(
            self.context,
            replace(self.settings, **settings),
            rank,
            (got if got is not None else []).append,
            self.orphaned.append,
        )
        self.ends.append(made)
        made.start()
        return made


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    context = zmq.asyncio.Context()
    got: list[tuple[int, FromRank]] = []
    link = RankLink(context, lambda rank, message: got.append((rank, message)))
    settings = ConnectorSettings(
        link_address=link.address, link_key=link.key.hex(), silence_s=30, worker_id="w", epoch=3, weights="m"
    )
    made = Rig(link, got, settings, zmq.Context.shadow(context))
    running = asyncio.create_task(link.run())
    yield made
    for end in made.ends:
        await asyncio.to_thread(end.stop)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    link.close()
    context.term()


async def test_orders_and_events_arrive_in_order_at_the_right_end(rig: Rig) -> None:
    got: dict[int, list[object]] = {0: [], 1: [], SCHEDULER: []}
    ends = {rank: rig.end(rank, got[rank]) for rank in got}
    for event in EVENTS:
        ends[1].send(event)
    ends[SCHEDULER].send(STEP)
    ends[0].send(READY)
    await until(lambda: len(rig.got) == len(EVENTS) + 2)
    assert [message for rank, message in rig.got if rank == 1] == list(EVENTS)
    assert (SCHEDULER, STEP) in rig.got and rig.link.connected() == {0, 1, SCHEDULER}
    for order in ORDERS:
        assert rig.link.send(None, order)
    assert rig.link.send(0, ORDERS[0])
    await until(lambda: len(got[0]) == len(ORDERS) + 1 and len(got[1]) == len(ORDERS))
    assert got == {0: [*ORDERS, ORDERS[0]], 1: list(ORDERS), SCHEDULER: []}
    assert not rig.orphaned


async def test_a_stranger_is_neither_heard_nor_obeyed(rig: Rig) -> None:
    rig.end(0, link_key=("00" * 32)).send(READY)
    await until(lambda: rig.link.num_dropped)
    assert not rig.got and not rig.link.connected()
    assert not rig.link.send(0, ORDERS[0])


async def test_a_rank_that_is_gone_is_reported(rig: Rig) -> None:
    end = rig.end(0)
    end.send(READY)
    await until(lambda: rig.got)
    await asyncio.to_thread(end.stop)
    await until(lambda: not rig.link.send(0, ORDERS[0]), "sending to a rank that is gone fails")


async def test_an_engine_ends_when_its_worker_is_silent(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "BEAT_S", 0.01)
    rig.end(0, silence_s=0.05, link_address="ipc:///nowhere/at-all")
    await until(lambda: rig.orphaned)
    assert rig.orphaned == ["the worker was silent for 0.05 s"]


async def test_messages_of_many_threads_all_arrive(rig: Rig) -> None:
    end = rig.end(0)
    threads = [
        threading.Thread(
            target=lambda number=number: [
                end.send(Sent(request_id=str(number), attempt=each, reason="")) for each in range(200)
            ]
        )
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    await until(lambda: len(rig.got) == 800)
    for thread in threads:
        thread.join()
    for number in range(4):
        sent = [m.attempt for _, m in rig.got if isinstance(m, Sent) and m.request_id == str(number)]
        assert sent == list(range(200))


def test_settings_and_parameters_survive_vllm() -> None:
    settings = ConnectorSettings(
        link_address="ipc://x", link_key="00", silence_s=1, worker_id="w", epoch=1, weights="m"
    )
    assert ConnectorSettings.of(settings.extra_config()) == settings
    with pytest.raises(ConfigError, match="kv_connector_extra_config"):
        ConnectorSettings.of({})
    target = KVTarget("d", 2, "tcp://h:1,2")
    for params in (
        TransferParams(),
        TransferParams(send=Send(request_id="a", attempt=1, target=target)),
        TransferParams(load=Load(request_id="a", attempt=1, num_tokens=300, first_block=1), earlier=1),
    ):
        assert TransferParams.of(params.to_dict()) == params


@pytest.mark.parametrize(
    "addresses",
    [("tcp://h:1",), ("tcp://h:1", "tcp://h:2", "tcp://k:2", "tcp://k:3"), ("tcp://[::1]:5", "tcp://[::1]:6")],
)
def test_addresses_of_ranks_are_joined_and_split(addresses: tuple[str, ...]) -> None:
    assert split_addresses(joined_addresses(addresses)) == addresses


def test_addresses_of_sixteen_ranks_fit_into_a_hello() -> None:
    addresses = [f"tcp://192.168.100.{100 + rank // 8}:{50_000 + rank}" for rank in range(16)]
    assert len(joined_addresses(addresses)) <= 256


async def test_ranks_on_other_hosts_connect_with_the_keys_of_their_worker(tmp_path: Path) -> None:
    file = tmp_path / "key"
    write_key_pair(str(file), KeyPair.generate())
    context = zmq.asyncio.Context()
    curve = Curve.load(str(file))
    assert curve is not None
    gatekeeper = Gatekeeper(zmq.Context.shadow(context), curve)
    gatekeeper.start()
    got: list[tuple[int, FromRank]] = []
    link = RankLink(context, lambda rank, message: got.append((rank, message)), host="127.0.0.1", curve=curve)
    assert link.address.startswith("tcp://127.0.0.1:")
    settings = ConnectorSettings(
        link_address=link.address,
        link_key=link.key.hex(),
        silence_s=30,
        worker_id="w",
        epoch=3,
        weights="m",
        curve_key=str(file),
    )
    running = asyncio.create_task(link.run())
    far = zmq.Context()
    ends = [WorkerLink(far, settings, 0), WorkerLink(far, replace(settings, curve_key=""), 1)]
    for end in ends:
        end.start()
        end.send(READY)
    await until(lambda: got)
    for end in ends:
        await asyncio.to_thread(end.stop)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    link.close()
    gatekeeper.stop()
    context.term()
    far.term()
    assert got == [(0, READY)]


async def test_ranks_of_this_host_connect_though_their_worker_has_keys(rig: Rig, tmp_path: Path) -> None:
    """The ipc socket in a private directory is not encrypted."""
    write_key_pair(str(tmp_path / "key"), KeyPair.generate())
    rig.end(0, curve_key=str(tmp_path / "key")).send(READY)
    await until(lambda: rig.got == [(0, READY)])


async def test_an_engine_ends_with_its_parent(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "BEAT_S", 0.01)
    rig.end(0)
    monkeypatch.setattr(links.os, "getppid", lambda: -1)
    await until(lambda: rig.orphaned)
    assert rig.orphaned == ["its parent process has ended"]


async def test_steps_are_dropped_for_a_slow_worker_but_events_are_kept(rig: Rig) -> None:
    end = rig.end(0, link_address="ipc:///nowhere/at-all")
    await until(lambda: end.send(STEP) or end.num_dropped_steps)
    for event in EVENTS:
        end.send(event)
    await until(lambda: list(end._queued)[-len(EVENTS) :] == [links.seal(rig.link.key, (0, each)) for each in EVENTS])
