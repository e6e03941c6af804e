"""Orders of routers to a worker: modes, weights, and what is left after a failure."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from common.engine.worker import serving
from common.engine.worker.serving import WorkerServing
from common.errors import ModelError
from common.model_files import ReceivedWeights
from common.wire.messages import ServingState, SetServing

from ....waiting import until


class Engine:
    has_commands = False

    def __init__(self) -> None:
        self.is_empty, self.is_held = True, False

    def hold(self, is_held: bool) -> None:
        self.is_held = is_held


@dataclass
class Worker:
    """Stands in for `Duties`, and notes which weights it serves."""

    serves: str = "own"
    fails: str = ""
    engine: Engine | None = field(default_factory=Engine)
    is_draining: bool = False
    is_changing: bool = False
    has_order: bool = False
    can_unload: bool = True
    has_renew: bool = True
    model: Any = "model"
    facts: Any = field(default_factory=lambda: SimpleNamespace(model_id="m"))
    config: Any = field(
        default_factory=lambda: SimpleNamespace(model="own", engine="other", lora_places=0, rank_hosts=1)
    )
    staged: list[str] = field(default_factory=list)
    hellos: list[str] = field(default_factory=list)

    @property
    def renew(self) -> Callable[[Any, Any], Callable[[], Any]] | None:
        def renew(model: Any, files: Any) -> Callable[[], Any]:
            if files.path == "/bad":
                raise ModelError("the file is damaged")
            self.staged.append(files.path)
            return lambda: files.path

        return renew if self.has_renew else None

    async def exchange(self, renewed: Callable[[], Any], control: Any) -> None:
        if self.fails:
            raise ModelError(self.fails)
        self.engine, self.serves = Engine(), renewed()

    async def free_replaced(self) -> None: ...

    async def unload(self) -> None:
        self.engine = None
        if self.fails:
            raise RuntimeError(self.fails)
        self.serves = ""

    async def reload(self, load: Callable[[], Any], control: Any) -> None:
        model = await asyncio.to_thread(load)
        self.engine, self.serves = Engine(), model.path

    def broadcast_hello(self) -> None:
        self.hellos.append(self.serves)


class Files(msgspec.Struct, frozen=True):
    path: str
    model_id: str = "x"
    weights_hash: str = "h"


@dataclass
class Rig:
    worker: Worker = field(default_factory=Worker)
    may_load: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_load.set()
        resolve: Any = Files
        load: Any = lambda files: (self.may_load.wait(5), files)[1]  # noqa: E731
        self.serving = WorkerServing(self.worker, load, lambda: None, resolve, lambda kept: None)  # type: ignore[arg-type]

    def order(self, version: int, **fields: Any) -> None:
        self.serving.order(SetServing(version=version, **fields), self.worker)  # type: ignore[arg-type]

    async def done(self, version: int, **fields: Any) -> ServingState:
        self.order(version, **fields)
        await until(lambda: self.state.status != "busy")
        return self.state

    @property
    def state(self) -> ServingState:
        assert self.serving.state is not None
        return self.serving.state


NEW: dict[str, Any] = {"weights": "/new", "weights_number": 1, "weight_version": "v"}
STAGED: dict[str, Any] = {"staged": "/new", "staged_number": 1}


async def test_an_update_stages_drains_and_exchanges() -> None:
    rig = Rig()
    worker = rig.worker
    assert rig.serving.state is None and worker.engine is not None
    worker.engine.is_empty = False
    staged = await rig.done(1, **STAGED)
    assert staged.status == "done" and worker.staged == ["/new"] and worker.serves == "own" and not worker.is_draining
    rig.order(2, mode="pause", **STAGED)
    await until(lambda: worker.is_draining)
    assert rig.state.status == "busy", "a request runs"
    worker.engine.is_empty = True
    await until(lambda: rig.state.status == "done")
    after = await rig.done(3, **NEW)
    assert (worker.serves, after.active_number, rig.serving.weight_version) == ("/new", 1, "v")
    assert worker.staged == ["/new"] and not worker.is_draining and worker.hellos[-1] == "/new"
    assert (await rig.done(4)).active_number == 0 and worker.serves == "own", "the way back"
    rig.order(3, **NEW)
    assert rig.state.version == 4, "an older order is ignored"


async def test_the_role_stays_while_an_order_is_executed() -> None:
    """A role change during the download of weights would drain a worker that reports itself as ready."""
    rig = Rig()
    rig.worker.is_changing = True
    rig.order(1, **STAGED)
    await until(lambda: rig.worker.has_order)
    assert rig.worker.staged == [], "the role change comes first"
    rig.worker.is_changing = False
    await until(lambda: rig.state.status == "done" and not rig.worker.has_order)
    await rig.done(2, staged="/bad", staged_number=2)
    await until(lambda: not rig.worker.has_order)


async def test_received_weights_replace_those_of_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = b"tensors"
    received = ReceivedWeights(hashlib.sha256(data).hexdigest(), len(data), tmp_path / "weights")
    received.path.write_bytes(data)
    monkeypatch.setattr(
        serving,
        "with_received",
        lambda files, path, sha256: Files(f"{files.path} with {path.read_bytes().decode()}", weights_hash=sha256),
    )
    rig = Rig()
    fields: dict[str, Any] = {"weights_number": 1, "weight_version": "v"}
    assert (await rig.done(10, staged=str(received), staged_number=1)).status == "done"
    assert rig.worker.staged == ["own with tensors"]
    assert (await rig.done(11, weights=str(received), **fields)).status == "done"
    assert rig.worker.serves == "own with tensors"
    await rig.serving.close()


async def test_a_failure_keeps_the_old_weights() -> None:
    rig = Rig()
    bad = await rig.done(1, staged="/bad", staged_number=1)
    assert (bad.status, bad.message, rig.worker.serves) == ("failed", "the file is damaged", "own")
    rig.worker.fails = "no room"
    failed = await rig.done(2, **NEW)
    assert (failed.status, failed.message, failed.active_number) == ("failed", "no room", 0)
    assert rig.serving.weight_version == "" and (await rig.done(3)).status == "done" and not rig.worker.is_draining


async def test_an_update_does_not_need_the_weights_that_it_replaces() -> None:
    """Trainers delete old checkpoints. A worker that joins without the current weights joins the next update."""
    rig = Rig()
    bad: dict[str, Any] = {"weights": "/bad", "weights_number": 1}
    assert (await rig.done(10, **bad)).status == "failed"
    assert (await rig.done(11, **bad, staged="/new", staged_number=2)).status == "done"
    assert rig.worker.is_draining and rig.worker.serves == "own" and rig.worker.hellos == []
    assert (await rig.done(12, mode="pause", **bad, staged="/new", staged_number=2)).status == "done"
    assert (await rig.done(13, weights="/new", weights_number=2)).status == "done"
    assert rig.worker.staged == ["/new"] and rig.worker.serves == "/new" and not rig.worker.is_draining


async def test_a_sleeping_worker_wakes_up_with_the_ordered_weights() -> None:
    rig = Rig()
    await rig.done(1, mode="sleep", **NEW)
    assert rig.worker.engine is None and rig.worker.is_draining and rig.serving.condition == "asleep"
    rig.may_load.clear()
    rig.order(2, **NEW)
    await until(lambda: rig.serving.is_waking)
    assert rig.serving.condition == "asleep"
    rig.may_load.set()
    awake = await rig.done(2, **NEW)
    assert not rig.serving.is_waking
    assert rig.worker.serves == "/new" and awake.active_number == 1 and not rig.worker.is_draining
    assert rig.serving.condition == ""


async def test_a_hold_suspends_the_engine_until_the_next_order() -> None:
    rig = Rig()
    assert rig.worker.engine is not None
    rig.worker.engine.is_empty = False
    assert (await rig.done(1, mode="hold")).status == "done" and rig.worker.engine.is_held and rig.worker.is_draining
    await rig.done(2)
    assert not rig.worker.engine.is_held and not rig.worker.is_draining


async def test_requests_end_before_weights_are_exchanged_in_a_hold() -> None:
    """Held requests would never end."""
    rig = Rig()
    before = rig.worker.engine
    assert before is not None
    before.is_empty = False
    rig.order(1, mode="hold", **NEW)
    await until(lambda: rig.worker.is_draining)
    assert not before.is_held
    before.is_empty = True
    await until(lambda: rig.state.status == "done")
    after = rig.worker.engine
    assert after is not None and after is not before and after.is_held and rig.worker.serves == "/new"


async def test_held_requests_may_end_before_the_worker_does() -> None:
    rig = Rig()
    await rig.done(1, mode="hold")
    assert rig.worker.engine is not None and rig.worker.engine.is_held
    await rig.serving.close()
    assert not rig.worker.engine.is_held


async def test_a_sleeping_worker_has_nothing_to_hold() -> None:
    rig = Rig()
    await rig.done(1, mode="sleep")
    assert (await rig.done(2, mode="hold")).status == "done" and rig.serving.condition == "asleep"


async def test_a_worker_that_cannot_free_its_model_ends() -> None:
    rig = Rig(Worker(fails="the engine did not stop"))
    rig.order(1, mode="sleep")
    with pytest.raises(RuntimeError, match="the engine did not stop"):
        await until(rig.serving.check)
    assert rig.serving.condition == "paused"


@pytest.mark.parametrize("order", [{"mode": "sleep"}, {"mode": "hold"}, STAGED])
async def test_an_engine_without_an_ability_refuses_by_name(order: dict[str, Any]) -> None:
    engine: Any = SimpleNamespace(is_empty=True, has_commands=False)
    rig = Rig(Worker(engine=engine, can_unload=False, has_renew=False))
    state = await rig.done(1, **order)
    assert state.status == "failed" and "--engine other cannot" in state.message
    assert (await rig.done(2)).status == "done" and rig.worker.serves == "own"


async def test_a_worker_whose_router_died_serves_again() -> None:
    rig = Rig()
    await rig.done(1, mode="pause", lease_s=0.05, **STAGED)
    await until(lambda: rig.state.version == 2 and rig.state.status == "done")
    assert rig.state.mode == "run" and not rig.worker.is_draining and rig.worker.serves == "own"
