from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest

from common.config import RouterConfig
from common.errors import Unavailable
from router.generation.models import Models
from router.generation.served_model import ServedModel
from router.observe.metrics import RouterMetrics
from router.server import server as subject
from router.server.app import build_app
from router.server.server import catch_up, listen, serve, stop_on_signals
from router.stored.location import store_of

from ...rig import Program


class Served:
    """`serve` in the test's own loop, stopped by a real signal."""

    def __init__(self, engine: Any, files: Any, text: Any) -> None:
        config = RouterConfig(model="tiny-random")
        metrics = RouterMetrics("tiny", engine.load)
        self.app = build_app(config, Models.of_one(ServedModel(engine, text, files, config, metrics)), metrics)
        self.engine, self.closed = engine, False
        self.listener = listen("127.0.0.1", 0)
        url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.http = httpx.AsyncClient(base_url=url, trust_env=False, verify=False, timeout=60)
        self.task = asyncio.create_task(serve(self.app, self.listener, self.close, stop_on_signals()))

    async def close(self) -> None:
        self.closed = True
        self.engine.error = Unavailable("the router is shutting down")
        self.engine.go.set()


@pytest.fixture
async def served(tools: Any, files: Any, text: Any) -> Any:
    served = Served(tools.Engine(hold_after=2), files, text)
    yield served
    await served.http.aclose()


async def ask(served: Served, tools: Any) -> asyncio.Task[httpx.Response]:
    body = {"prompt": "a", "max_tokens": 5, "stream": True}
    request = asyncio.create_task(served.http.post("/v1/completions", json=body))
    await tools.until(lambda: served.engine.requests)
    return request


async def test_running_answers_finish_and_every_connection_closes(
    served: Served, tools: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(subject, "NOTICE_S", 0.1)
    caplog.set_level(logging.INFO)
    router_state = served.app.state.router_state
    request = await ask(served, tools)
    idle = await asyncio.open_connection(*served.listener.getsockname())
    os.kill(os.getpid(), signal.SIGTERM)
    await tools.until(lambda: router_state.draining)
    drains = [record for record in caplog.records if record.message == "draining"]
    assert [vars(record)["requests"] for record in drains] == [1]
    served.engine.hold_after = -1
    new = await served.http.post("/v1/completions", json={"prompt": "a"})
    streamed = await served.http.post("/v1/completions", json={"prompt": "a", "stream": True})
    probes = [await served.http.get(path) for path in ("/health", "/metrics", "/none", "/v1/completions")]
    assert [new.status_code, streamed.status_code, *(one.status_code for one in probes)] == [
        200,
        200,
        200,
        200,
        404,
        405,
    ]
    router_state.refusing = True
    refused = [await served.http.get("/ready"), await served.http.post("/v1/completions", json={"prompt": "a"})]
    assert [(one.status_code, one.headers["retry-after"]) for one in refused] == [(503, "1")] * 2
    assert {one.headers.get("connection") for one in (new, streamed, *probes, *refused)} == {"close"}
    assert await idle[0].read() == b""
    idle[1].close()
    assert not served.closed
    served.engine.go.set()
    assert (await request).text.endswith("data: [DONE]\n\n")
    await served.task
    assert served.closed


@pytest.mark.parametrize(("drain_s", "notice_s", "idle_s"), [(600.0, 5.0, 1.0), (3.0, 0.5, 0.5)])
def test_idle_connections_stay_open_for_a_part_of_the_drain(drain_s: float, notice_s: float, idle_s: float) -> None:
    assert subject.idle_limit_s(notice_s - 0.1, drain_s) == math.inf
    assert subject.idle_limit_s(notice_s, drain_s) == idle_s


async def test_answers_that_take_too_long_end_with_an_error(served: Served, tools: Any) -> None:
    router_state = served.app.state.router_state
    router_state.config = dataclasses.replace(router_state.config, drain_timeout_s=0.05)
    request = await ask(served, tools)
    os.kill(os.getpid(), signal.SIGTERM)
    last = (await request).text.removesuffix("\n\n").rpartition("data: ")[2]
    assert json.loads(last)["error"]["code"] == "service_unavailable"
    await served.task


@pytest.mark.parametrize("in_time", [True, False])
async def test_answers_in_the_background_finish_or_are_cancelled(served: Served, tools: Any, in_time: bool) -> None:
    router_state, kept = served.app.state.router_state, served.app.state.responses
    router_state.config = dataclasses.replace(router_state.config, drain_timeout_s=12.0 if in_time else 0.0)
    body = {"input": "a", "max_output_tokens": 5, "background": True}
    name = (await served.http.post("/v1/responses", json=body)).json()["id"]
    await tools.until(lambda: kept.background.find(name, "").response["status"] == "in_progress")
    os.kill(os.getpid(), signal.SIGTERM)
    await tools.until(lambda: router_state.draining)
    if in_time:
        served.engine.go.set()
    await served.task
    again = store_of(router_state.config, lambda reason: None)
    assert again is not None
    found, _ = await again.find(name, "") or (None, None)
    again.close()
    assert found is not None and found.status == ("incomplete" if in_time else "cancelled")
    assert (b"The router shut down" in found.head) is not in_time


# ---------------------------------------------------------------- the process

FLAGS = ["--model", "tiny-random", "--decode", "tcp://127.0.0.1:1"]
COMMAND = [sys.executable, "-P", "-m", "router", *FLAGS]


@pytest.mark.slow
@pytest.mark.e2e
def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run([*COMMAND, "--port", port], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == f"diptych router: cannot listen on 127.0.0.1:{port}: Address already in use\n"


@pytest.mark.slow
@pytest.mark.e2e
def test_a_store_that_is_damaged_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "r.sqlite3"
    file.write_bytes(b"no database" * 1000)
    command = [*COMMAND, "--port", "0", "--response-store", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert str(file) in done.stderr and "not a database" in done.stderr and "--response-store" in done.stderr


@pytest.mark.slow
@pytest.mark.e2e
def test_a_model_that_is_not_there_is_one_line() -> None:
    command = [*COMMAND, "--port", "0", "--model", "no-such-model"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no-such-model" in done.stderr


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_it_listens_without_workers_and_ends_in_order(number: signal.Signals, launch: Callable[..., Program]) -> None:
    router = launch(*COMMAND, "--port", "0", "--log-json")
    port = json.loads(router.wait_for_line('"listening"'))["port"]
    assert httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False, timeout=30).status_code == 503
    router.send_signal(number)
    router.wait(time.monotonic() + 30)
    assert router.returncode == 0, router.describe_end()
    assert "listening" in [json.loads(line)["message"] for line in router.output().splitlines()]
    assert "Traceback" not in router.output()


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


async def test_it_waits_for_each_model_that_another_process_has_workers_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "PATIENCE_S", 3600.0)
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
