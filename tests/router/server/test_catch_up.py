"""When a process that was started again takes connections."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from router.server import server as subject
from router.server.server import catch_up


@dataclass
class Siblings:
    """Other processes and the models that each has workers for."""

    able: list[list[str]]

    async def ask_all(self, path: str) -> dict[int, bytes]:
        return {number: orjson.dumps(models) for number, models in enumerate(self.able, 1)}


@dataclass
class Process:
    """This process: `available` grows as it hears from workers."""

    available: list[str] = field(default_factory=list)

    async def begin(self, *others: list[str], stop: asyncio.Event | None = None) -> None:
        service: Any = SimpleNamespace(models=self)
        siblings: Any = Siblings(list(others))
        await catch_up(service, siblings, stop or asyncio.Event())


async def test_it_waits_for_each_model_that_another_process_has_workers_of() -> None:
    process = Process(["a"])
    begun = asyncio.create_task(process.begin(["a"], ["b"]))
    await asyncio.sleep(5 * subject.POLL_S)
    assert not begun.done()
    process.available.append("b")
    await asyncio.wait_for(begun, 10)


async def test_the_first_of_all_does_not_wait() -> None:
    await asyncio.wait_for(Process().begin([], []), 10)


async def test_its_patience_ends(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(subject, "PATIENCE_S", 0.05)
    await asyncio.wait_for(Process().begin(["a", "b"]), 10)
    (record,) = caplog.records
    assert record.__dict__["models"] == "a, b"


async def test_it_does_not_wait_when_it_is_to_end() -> None:
    stop = asyncio.Event()
    stop.set()
    await asyncio.wait_for(Process().begin(["a"], stop=stop), 10)
