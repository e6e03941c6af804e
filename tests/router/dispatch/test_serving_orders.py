"""Pauses, sleeps and weight updates of all workers together: the orders that they get, and the way back."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from common.errors import DeadlineExceeded, InvalidRequest, Unavailable
from common.model_files import MAX_HEAD_BYTES, ReceivedWeights
from common.wire.messages import ServingState, SetServing
from router.dispatch import serving_orders
from router.dispatch.serving_orders import ServingOrders
from router.fleet.registry import WorkerRegistry
from router.fleet.serving import FleetServing
from router.fleet.weights import WeightsFiles

from ...fake_worker import heartbeat_of, hello_of


class Fleet:
    """A prefill and a decode worker, which execute each order at once, unless `refuses` or `ignores` one of them."""

    def __init__(self, protocol: int = 13, memory_bytes: int = 1000) -> None:
        self.registry = WorkerRegistry(["p"], ["d"], worker_timeout_s=60.0)
        self.serving = FleetServing(self.registry)
        self.orders: list[SetServing] = []
        self.refuses: Callable[[str, SetServing], str] = lambda address, order: ""
        self.ignores: Callable[[str, SetServing], bool] = lambda address, order: False
        for address, role in (("p", "prefill"), ("d", "decode")):
            self.registry.on_hello(address, hello_of(address, role, protocol=protocol, memory_bytes=memory_bytes), 0.0)
            self.registry.on_heartbeat(address, heartbeat_of(address), 0.0)
        self.num_aborts = 0
        self.weights = WeightsFiles(lambda address, message: True)
        fleet: Any = self
        self.under_test = ServingOrders(fleet, self.abort_all)

    def abort_all(self) -> None:
        self.num_aborts += 1

    def send(self, address: str, order: SetServing) -> bool:
        if address == "p":
            self.orders.append(order)
        if not self.ignores(address, order):
            why = self.refuses(address, order)
            state = ServingState(
                order.version, order.mode, "failed" if why else "done", order.weights, order.weights_number,
                order.weight_version, order.weights_number, order.aborts, why,
            )  # fmt: skip
            beat = heartbeat_of(address, serving=state, draining=order.mode != "run")
            self.registry.on_heartbeat(address, beat, 0.0)
        return True

    def sent(self) -> list[tuple[str, str, str]]:
        """The orders: mode, weights and staged weights."""
        return [(order.mode, order.weights, order.staged) for order in self.orders]

    async def update_from_body(self, data: bytes, version: str = "v1", sha256: str = "") -> int:
        async def body(max_bytes: int) -> AsyncIterator[bytes]:
            assert max_bytes == 1000 + MAX_HEAD_BYTES
            yield data

        options = {"aborts": False, "keep_pause": False}
        return await self.under_test.update_from_body(body, sha256, version, **options)

    async def update(self, path: str = "/new", *, aborts: bool = False, keep_pause: bool = False) -> int:
        return await self.under_test.update(path, "v1", aborts=aborts, keep_pause=keep_pause)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


async def test_an_update_stages_then_drains_then_exchanges(fleet: Fleet) -> None:
    assert fleet.under_test.weight_version == "default"
    assert await fleet.update(aborts=True) == 2
    assert fleet.sent() == [("run", "", "/new"), ("pause", "", "/new"), ("run", "/new", "")]
    assert fleet.num_aborts == 1 and fleet.under_test.weight_version == "v1" and not fleet.under_test.is_paused
    versions = [order.version for order in fleet.orders]
    assert versions == sorted(set(versions)) and fleet.orders[2].weights_number == fleet.orders[0].staged_number
    assert [bool(order.lease_s) for order in fleet.orders] == [True, True, False]


@pytest.mark.parametrize("is_paused_before", [False, True])
async def test_a_pause_outlives_an_update(fleet: Fleet, *, is_paused_before: bool) -> None:
    if is_paused_before:
        await fleet.under_test.pause("wait")
    await fleet.update(keep_pause=not is_paused_before)
    assert fleet.under_test.is_paused and fleet.num_aborts == 0
    await fleet.under_test.resume()
    assert not fleet.under_test.is_paused and fleet.under_test.weight_version == "v1"


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_a_worker_that_fails_at_any_stage_leaves_all_with_the_old_weights(fleet: Fleet, number: int) -> None:
    fleet.refuses = lambda address, order: "no room" if address == "d" and len(fleet.orders) == number + 1 else ""
    with pytest.raises(InvalidRequest, match="worker d: no room"):
        await fleet.update()
    assert len(fleet.orders) == number + 2 and fleet.sent()[-1] == ("run", "", "")
    assert fleet.under_test.weight_version == "default"
    assert len(fleet.registry.ready("prefill")) == len(fleet.registry.ready("decode")) == 1


async def test_a_worker_that_is_late_leaves_all_with_the_old_weights(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_orders, "DRAIN_S", 0.01)
    fleet.ignores = lambda address, order: address == "d" and order.mode == "pause"
    with pytest.raises(DeadlineExceeded, match="abort_all_requests: .* by worker d"):
        await fleet.update()
    assert fleet.sent()[-1] == ("run", "", "")


def file_of(content: bytes) -> bytes:
    return (2).to_bytes(8, "little") + b"{}" + content


async def test_received_weights_are_kept_as_long_as_they_are_the_newest(fleet: Fleet) -> None:
    received: list[ReceivedWeights] = []
    try:
        for content in (b"one", b"two"):
            assert await fleet.update_from_body(file_of(content), version=content.decode()) == 2
            weights = ReceivedWeights.parse(fleet.sent()[-1][1])
            assert weights is not None and weights.path.read_bytes() == file_of(content)
            assert weights.sha256 == hashlib.sha256(file_of(content)).hexdigest()
            received.append(weights)
        assert not received[0].path.exists() and fleet.under_test.weight_version == "two"

        for data, sha256, why in (
            (file_of(b"three"), "0" * 64, "sha256: the body has"),
            (b"\x80\x04" + b"x" * 99, "", "not a safetensors file. Pickled"),
            (b"{}", "", "The body has 2 bytes"),
            ((2**40).to_bytes(8, "little") + b"{}", "", "the maximum is 33,554,432"),
        ):
            with pytest.raises(InvalidRequest, match=why):
                await fleet.update_from_body(data, sha256=sha256)
        fleet.refuses = lambda address, order: "tensor a is missing" if order.staged else ""
        with pytest.raises(InvalidRequest, match="tensors: worker p: tensor a is missing"):
            await fleet.update_from_body(file_of(b"four"))
        assert [path.name for path in received[1].path.parent.iterdir() if path.suffix] == [received[1].path.name]
        assert fleet.sent()[-1] == ("run", str(received[1]), "") and fleet.under_test.weight_version == "two"
    finally:
        await fleet.weights.close()
    assert not received[1].path.parent.exists()


async def test_weights_are_refused_before_their_body_is_read(fleet: Fleet) -> None:
    with pytest.raises(InvalidRequest, match="worker p does not run Diptych's engine"):
        await Fleet(memory_bytes=0).update_from_body(file_of(b"x"))
    await fleet.under_test.sleep("wait")
    with pytest.raises(InvalidRequest, match="/wake_up"):
        await fleet.update_from_body(file_of(b"x"))


async def test_sleep_and_wake_up(fleet: Fleet) -> None:
    await fleet.update()
    await fleet.under_test.sleep("abort")
    assert fleet.under_test.is_asleep and fleet.num_aborts == 1
    for attempt in (fleet.update(), fleet.under_test.pause("wait"), fleet.under_test.resume()):
        with pytest.raises(InvalidRequest, match="/wake_up"):
            await attempt
    await fleet.under_test.wake_up()
    assert fleet.sent()[-1] == ("run", "/new", "") and not fleet.under_test.is_asleep


async def test_what_is_refused(fleet: Fleet) -> None:
    await fleet.under_test.pause("keep")
    assert fleet.sent() == [("hold", "", "")] and fleet.num_aborts == 0
    with pytest.raises(InvalidRequest, match="mode=keep"):
        await fleet.update()
    with pytest.raises(InvalidRequest, match="'abort' or 'wait'"):
        await fleet.under_test.sleep("keep")
    await fleet.under_test.resume()
    fleet.refuses = lambda address, order: "cannot sleep" if order.mode == "sleep" else ""
    with pytest.raises(InvalidRequest, match="cannot sleep"):
        await fleet.under_test.sleep("wait")
    assert fleet.sent()[-1] == ("run", "", "") and not fleet.under_test.is_asleep
    with pytest.raises(InvalidRequest, match="finish the upgrade"):
        await Fleet(protocol=12).under_test.pause("wait")
    for address in ("p", "d"):
        fleet.registry.on_cut(address)
    with pytest.raises(Unavailable, match="No worker is ready"):
        await fleet.update()
