"""The names of a worker's adapters, as flags and routers change them."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from common.engine.worker import adapters as module
from common.engine.worker.adapters import WorkerAdapters
from common.errors import ModelError
from common.wire.messages import FLAG_VERSION, MAX_ADAPTERS, SetAdapter


@dataclass
class Held:
    digest: str
    rank: int = 4
    num_bytes: int = 100


@dataclass
class Bank:
    """Loads what is at a path at once, or when `go` is set; the digest is the path's."""

    go: threading.Event = field(default_factory=threading.Event)
    retired: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.go.set()

    def load(self, name: str, path: str) -> Held:
        assert self.go.wait(60.0)
        if path.startswith("/bad"):
            raise ModelError(f"{path} is damaged")
        self.loaded.append(path)
        return Held(path.strip("/"))

    def retire(self, digest: str) -> None:
        self.retired.append(digest)


def order(name: str, version: int, path: str = "") -> SetAdapter:
    return SetAdapter(name=name, version=version, path=path)


def shown(adapters: WorkerAdapters) -> dict[str, tuple[int, str, str]]:
    return {one.name: (one.version, one.status, one.digest) for one in adapters.states}


async def settled(adapters: WorkerAdapters) -> None:
    async with asyncio.timeout(60):
        await adapters.loaded()
    assert all(one.status != "loading" for one in adapters.states)


async def begun(bank: Any, *named: str) -> WorkerAdapters:
    adapters = WorkerAdapters(lambda: None)
    await adapters.load_flags(bank, named)
    return adapters


async def test_flags_come_first_and_orders_are_newer() -> None:
    bank = Bank()
    adapters = await begun(bank, "a=/one")
    assert shown(adapters) == {"a": (FLAG_VERSION, "loaded", "one")}
    adapters.order(order("a", FLAG_VERSION, "/other"))
    assert shown(adapters) == {"a": (FLAG_VERSION, "loaded", "one")}, "an order that is not newer counts"
    adapters.order(order("a", 5, "/other"))
    await settled(adapters)
    assert shown(adapters) == {"a": (5, "loaded", "other")} and bank.retired == ["one"]
    adapters.order(order("a", 6))
    assert shown(adapters) == {"a": (6, "unloaded", "")} and bank.retired == ["one", "other"]


async def test_a_flag_that_is_refused_ends_the_start() -> None:
    with pytest.raises(ModelError, match="--lora a: /bad is damaged"):
        await begun(Bank(), "a=/bad")


async def test_a_failure_is_told_and_a_newer_order_tried() -> None:
    adapters = await begun(Bank())
    adapters.order(order("a", 5, "/bad"))
    await settled(adapters)
    (state,) = adapters.states
    assert (state.status, state.message) == ("failed", "/bad is damaged")
    adapters.order(order("a", 6, "/good"))
    await settled(adapters)
    assert shown(adapters) == {"a": (6, "loaded", "good")}


async def test_what_is_unloaded_while_it_is_read_is_freed() -> None:
    bank = Bank()
    adapters = await begun(bank)
    bank.go.clear()
    adapters.order(order("a", 5, "/one"))
    await asyncio.sleep(0.01)
    adapters.order(order("a", 6))
    bank.go.set()
    await adapters.close()
    assert shown(adapters) == {"a": (6, "unloaded", "")} and bank.retired == ["one"]


async def test_a_load_that_hangs_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.05)
    bank = Bank()
    adapters = await begun(bank)
    bank.go.clear()
    adapters.order(order("a", 5, "/one"))
    await asyncio.sleep(0.01)
    async with asyncio.timeout(60):
        await adapters.close()
        await asyncio.get_running_loop().shutdown_default_executor()  # as `asyncio.run` does
    assert shown(adapters) == {"a": (5, "loading", "")}
    bank.go.set()


async def test_weights_stay_while_another_name_stands_for_them() -> None:
    bank = Bank()
    adapters = await begun(bank, "a=/one", "b=/one")
    adapters.order(order("a", 5))
    assert bank.retired == []
    adapters.order(order("b", 6))
    assert bank.retired == ["one"]


async def test_names_that_stand_for_nothing_are_bounded() -> None:
    adapters = await begun(Bank(), "a=/one")
    for i in range(MAX_ADAPTERS + 20):
        adapters.order(order(f"n{i}", 10 + i))
    names = shown(adapters)
    assert len(names) == MAX_ADAPTERS and "a" in names and "n0" not in names
