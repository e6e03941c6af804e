"""A router that loads models on demand, with workers that follow a script and a supervisor of a few lines."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.config import RouterConfig
from common.errors import ConfigError, ModelNotFound
from common.model_files.tiny import make_tiny_model
from router.models.local_table import LocalTable
from router.planner.on_demand import (
    ModelReport,
    OnDemandFolder,
    Report,
    ServiceSettings,
    Wanted,
    WantedModel,
    WorkerMemory,
)
from router.server.serving import Serving

from ...waiting import until
from ..cluster import Cluster, SocketWorker

EACH = 10**9
"""Bytes of a model. Two fit."""


class Supervisor:
    """Gives wanted models a decode worker, unless they are in `failing`, or after `hold` is cleared."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.exchange, self.cluster = OnDemandFolder(folder), cluster
        self.workers: dict[tuple[str, int], SocketWorker] = {}
        self.failing: dict[str, str] = {}
        self.loads: list[str] = []
        self.hold = asyncio.Event()
        self.hold.set()

    async def run(self) -> None:
        failed: dict[str, ModelReport] = {}
        while True:
            await self.hold.wait()
            wanted = {(one.model, one.load): one for one in self.exchange.wanted().models}
            for key in self.workers.keys() - wanted.keys():
                self.workers.pop(key).die()
            for key, one in wanted.items():
                if key not in self.workers and (one.model not in failed or failed[one.model].load != one.load):
                    self.start(one, failed)
            reports = [
                ModelReport(model, load, decode=(worker.address,)) for (model, load), worker in self.workers.items()
            ]
            self.exchange.write_report(Report((*reports, *failed.values())))
            await asyncio.sleep(0.01)

    def start(self, one: WantedModel, failed: dict[str, ModelReport]) -> None:
        self.loads.append(Path(one.model).name)
        if reason := self.failing.get(Path(one.model).name):
            failed[one.model] = ModelReport(one.model, one.load, failure=reason)
        else:
            failed.pop(one.model, None)
            self.workers[one.model, one.load] = self.cluster.add("decode", model=Path(one.model).name)


class Router:
    """A router in this process, and its supervisor."""

    def __init__(self, serving: Serving, supervisor: Supervisor, models: Path) -> None:
        self.serving, self.supervisor, self.models = serving, supervisor, models
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(serving.app), base_url="http://router", timeout=30)

    async def ask(self, model: str | None, **fields: Any) -> httpx.Response:
        body = {"model": model, "prompt": "hi", "max_tokens": 2} | fields
        return await self.http.post("/v1/completions", json=body)

    async def generate(self, model: str, **fields: Any) -> dict[str, Any]:
        reply = await self.http.post("/api/generate", json={"model": model, "stream": False} | fields)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    async def states(self) -> dict[str, str]:
        return {one["id"]: one["state"] for one in (await self.http.get("/v1/models")).json()["data"]}


@pytest.fixture
async def router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Router]:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr("router.server.model_loader.LOOK_S", 0.01)
    models, folder = tmp_path / "models", tmp_path / "exchange"
    folder.mkdir()
    for seed, name in enumerate(("alpha", "beta", "gamma")):
        make_tiny_model(models / name, seed=seed)
    memory = WorkerMemory(kv_bytes=EACH, parameter_bytes=0.0, rest=0)
    OnDemandFolder(folder).write_settings(ServiceSettings(str(models), 300.0, 2 * EACH, 0, 1, memory, memory))
    cluster = Cluster()
    supervisor = Supervisor(folder, cluster)
    serving = Serving(RouterConfig(on_demand_folder=str(folder), response_store="memory"))
    await serving.start()
    following = asyncio.create_task(supervisor.run())
    found = Router(serving, supervisor, models)
    yield found
    await found.http.aclose()
    following.cancel()
    await serving.app.state.responses.close()
    serving.app.state.router_state.access.close()
    await serving.close()
    for worker in supervisor.workers.values():
        worker.die()
    cluster.context.term()


async def test_first_requests_load_a_model_once_and_the_least_recently_used_one_goes(router: Router) -> None:
    assert await router.states() == {"alpha": "idle", "beta": "idle", "gamma": "idle"}
    replies = await asyncio.gather(*(router.ask("alpha") for _ in range(3)))
    assert [reply.status_code for reply in replies] == [200] * 3, replies[0].text
    assert (await router.ask("beta")).json()["model"] == "beta"
    assert (await router.ask("alpha")).status_code == 200
    assert (await router.ask("gamma")).status_code == 200
    assert await router.states() == {"alpha": "loaded", "beta": "idle", "gamma": "loaded"}
    assert router.supervisor.loads == ["alpha", "beta", "gamma"]
    load = (await router.http.get("/load")).json()
    assert {one["id"]: one["state"] for one in load["models"]} == await router.states()
    assert all(0 < one["expires_in_s"] <= 300 for one in load["models"] if one["state"] == "loaded")


async def test_a_request_waits_while_its_model_is_loading_and_others_are_refused_with_the_numbers(
    router: Router,
) -> None:
    router.supervisor.hold.clear()
    waiting = [asyncio.create_task(router.ask(model)) for model in ("alpha", "beta")]
    await until(lambda: set(router.serving.app.state.router_state.models.served) == {"alpha", "beta"})
    assert (await router.states())["alpha"] == "loading"
    ready = await router.http.get("/ready", params={"model": "alpha"})
    assert ready.json() == {"status": "ready", "detail": "the model is loading"}
    refused = await router.ask("gamma")
    assert refused.status_code == 503 and refused.headers["retry-after"]
    message = refused.json()["error"]["message"]
    assert "'gamma' needs 1.0 GB of memory. Of 2.0 GB for models" in message
    assert "alpha (1.0 GB)" in message and "beta (1.0 GB)" in message
    router.supervisor.hold.set()
    assert [(await one).status_code for one in waiting] == [200, 200]


async def test_a_router_that_stops_fails_the_requests_that_wait_for_a_model(router: Router) -> None:
    router.supervisor.hold.clear()
    waiting = asyncio.create_task(router.ask("alpha"))
    await until(lambda: "alpha" in router.serving.app.state.router_state.models.served)
    await router.serving.close_workers()
    assert (await waiting).json()["error"]["message"] == "The router is shutting down."
    router.supervisor.hold.set()


async def test_a_model_that_cannot_be_loaded_tells_why_and_is_tried_again_later(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.planner.residency.FIRST_PAUSE_S", 0.2)
    router.supervisor.failing["alpha"] = "decode-0 exited: no space"
    for reply in await asyncio.gather(router.ask("alpha"), router.ask("alpha")):
        assert reply.status_code == 503 and reply.headers["retry-after"] == "1"
        assert reply.json()["error"]["message"] == "The model 'alpha' cannot be loaded: decode-0 exited: no space"
    assert router.supervisor.loads == ["alpha"]
    (router.models / "gamma" / "tokenizer.json").write_text("{")
    reply = await router.ask("gamma")
    assert reply.status_code == 503 and "tokenizer.json" in reply.json()["error"]["message"]
    router.supervisor.failing.clear()
    await asyncio.sleep(0.3)
    assert (await router.ask("alpha")).status_code == 200
    assert router.supervisor.loads == ["alpha", "alpha"]


async def test_keep_alive_of_ollama(router: Router) -> None:
    assert (await router.generate("alpha"))["done_reason"] == "load"
    assert (await router.states())["alpha"] == "loaded"

    async def expiries() -> dict[str, str]:
        return {one["name"]: one["expires_at"] for one in (await router.http.get("/api/ps")).json()["models"]}

    assert not (await expiries())["alpha:latest"].startswith("9999")
    await router.generate("alpha", prompt="hi", keep_alive=-1)
    assert (await expiries())["alpha:latest"].startswith("9999")
    assert (await router.generate("alpha", prompt="hi", keep_alive="0s"))["done"]
    await until(lambda: not router.supervisor.workers)
    assert await expiries() == {}
    await router.generate("alpha", keep_alive="20ms")
    await until(lambda: not router.supervisor.workers)
    await router.generate("beta")
    assert (await router.generate("beta", keep_alive=0))["done_reason"] == "unload"
    await until(lambda: not router.supervisor.workers)
    wrong = await router.http.post("/api/generate", json={"model": "alpha", "keep_alive": "soon"})
    assert wrong.status_code == 400 and "keep_alive" in wrong.text


async def test_new_models_are_found_and_texts_need_no_workers(router: Router) -> None:
    counted = await router.http.post("/tokenize", json={"model": "alpha", "prompt": "hello"})
    assert counted.json()["count"] == 5
    assert (await router.http.post("/api/show", json={"model": "beta"})).json()["capabilities"]
    for path in ("/load", "/load/history"):
        replies = [await router.http.get(path, params=params) for params in ({}, {"model": "gamma"})]
        assert [reply.status_code for reply in replies] == [200, 200], path
    assert router.supervisor.loads == []
    assert (await router.ask("delta")).status_code == 404
    make_tiny_model(router.models / "delta", seed=9)
    assert (await router.ask("delta")).status_code == 200
    tags = {one["name"]: one for one in (await router.http.get("/api/tags")).json()["models"]}
    assert tags["delta:latest"]["state"] == "loaded" and tags["gamma:latest"]["size"] > 100_000
    assert (await router.ask(None)).json()["model"] == "alpha", "the default is the first"
    await router.generate("alpha", keep_alive=0)
    await until(lambda: router.serving.loader and router.serving.loader.residency.stage("alpha") == "idle")
    shutil.rmtree(router.models / "alpha")
    assert "alpha" not in await router.states()
    assert (await router.ask("alpha")).status_code == 404
    make_tiny_model(router.models / "alpha", seed=0)
    template = "another {{ messages[0].content }}"
    (router.models / "alpha" / "chat_template.jinja").write_text(template)
    assert (await router.ask("alpha")).status_code == 200
    assert (await router.http.post("/api/show", json={"model": "alpha"})).json()["template"] == template


async def test_a_model_that_has_been_deleted_is_unloaded_and_closed(router: Router) -> None:
    assert (loader := router.serving.loader) is not None
    for name in ("alpha", "beta"):
        assert (await router.ask(name)).status_code == 200
    (alpha,) = (one for one in loader.backends if one.name == "alpha")
    assert 'model_name="alpha"' in (await router.http.get("/metrics")).text
    shutil.rmtree(router.models / "alpha")
    assert "alpha" not in await router.states()
    await until(lambda: len(loader.backends) == 1 and not alpha.dispatcher.fleet.connections)
    assert not alpha.dispatcher.ready[0] and "alpha" not in loader.residency.models
    assert 'model_name="alpha"' not in (await router.http.get("/metrics")).text
    assert (await router.ask("beta")).status_code == 200 and len(router.supervisor.workers) == 1


async def test_a_client_without_a_key_causes_no_search_for_models(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, searches = router.serving.app.state.router_state.models, list[str]()

    async def refresh() -> None:
        searches.append("")

    monkeypatch.setattr(models.loader, "refresh", refresh)
    for with_key in (False, True):
        with pytest.raises(ModelNotFound):
            await models.availability("delta", with_key=with_key)
        assert len(searches) == with_key
    assert await models.availability("alpha", with_key=False) == (True, "the model is idle")


async def test_endpoints_for_operators_open_a_model_that_has_not_been_used(router: Router) -> None:
    paused = await router.http.get("/is_paused", params={"model": "alpha"})
    assert paused.json() == {"is_paused": False}
    assert (await router.http.get("/weight_info", params={"model": "beta"})).json() == {"weight_version": "default"}
    reply = await router.http.post("/update_weights_from_disk", json={"model": "gamma", "model_path": "/w"})
    assert reply.status_code == 503 and reply.json()["error"]["message"] == "No worker is ready."
    assert router.supervisor.loads == []


async def test_the_files_of_an_idle_model_are_checked_in_a_thread(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp = LocalTable.stamp
    threads: set[threading.Thread] = set()

    def noted(table: LocalTable, model: str) -> tuple[tuple[int, int], ...]:
        threads.add(threading.current_thread())
        return stamp(table, model)

    async def counted() -> int:
        reply = await router.http.post("/tokenize", json={"model": "alpha", "prompt": "hello"})
        count: int = reply.json()["count"]
        return count

    assert await counted() == 5
    monkeypatch.setattr(LocalTable, "stamp", noted)
    assert await asyncio.gather(counted(), counted(), counted()) == [5, 5, 5]
    assert threads and threading.current_thread() not in threads


async def test_the_next_router_adopts_loaded_models(router: Router, tmp_path: Path) -> None:
    assert (await router.ask("alpha")).status_code == 200
    folder = tmp_path / "exchange"
    assert [one["is_ready"] for one in json.loads((folder / "wanted.json").read_bytes())["models"]] == [True]
    assert router.serving.loader is not None
    await router.serving.loader.close()  # it writes nothing more
    after = Serving(RouterConfig(on_demand_folder=str(folder), response_store="memory"))
    await after.start()
    other = Router(after, router.supervisor, router.models)
    assert (await other.ask("alpha")).status_code == 200
    assert router.supervisor.loads == ["alpha"]
    await other.http.aclose()
    await after.app.state.responses.close()
    after.app.state.router_state.access.close()
    await after.close()


async def test_the_next_router_unloads_a_model_that_has_been_deleted(router: Router, tmp_path: Path) -> None:
    assert (await router.ask("alpha")).status_code == 200
    assert router.serving.loader is not None
    await router.serving.loader.close()
    shutil.rmtree(router.models / "alpha")
    after = Serving(RouterConfig(on_demand_folder=str(tmp_path / "exchange"), response_store="memory"))
    await after.start()
    await until(lambda: not router.supervisor.workers)
    await after.app.state.responses.close()
    after.app.state.router_state.access.close()
    await after.close()


async def test_a_full_disk_is_reported_once_until_the_wanted_models_are_written(
    router: Router, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, num_failures = OnDemandFolder.write_wanted, 0

    def fail_first(folder: OnDemandFolder, wanted: Wanted) -> None:
        nonlocal num_failures
        if num_failures < 5:
            num_failures += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(folder, wanted)

    monkeypatch.setattr(OnDemandFolder, "write_wanted", fail_first)
    assert (await router.ask("alpha")).status_code == 200
    assert num_failures == 5
    assert sum("cannot exchange files" in one.getMessage() for one in caplog.records) == 1


async def test_requests_for_loaded_models_change_nothing_for_those_that_wait(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert router.serving.loader is not None
    assert (await router.ask("alpha")).status_code == 200
    router.supervisor.hold.clear()
    waiting = asyncio.create_task(router.ask("beta"))
    await until(lambda: router.serving.loader and router.serving.loader.residency.stage("beta") == "loading")
    written: list[Wanted] = []
    with monkeypatch.context() as patch:
        patch.setattr(OnDemandFolder, "write_wanted", lambda folder, wanted: written.append(wanted))
        assert (await router.ask("alpha")).status_code == 200
    assert written == []
    router.supervisor.hold.set()
    assert (await waiting).status_code == 200


async def test_models_of_a_file_are_loaded_on_demand_and_added_without_a_restart(
    router: Router, tmp_path: Path
) -> None:
    """Its settings, aliases and limits are used. A file with an error changes nothing."""
    file, folder = tmp_path / "models.toml", tmp_path / "exchange"
    file.write_text(f'[[model]]\nmodel = "{router.models / "beta"}"\nname = "b"\naliases = ["fast"]\n')
    assert router.serving.loader is not None
    await router.serving.loader.close()
    serving = Serving(RouterConfig(on_demand_folder=str(folder), response_store="memory", models_file=str(file)))
    await serving.start()
    assert serving.loader is not None
    other = Router(serving, router.supervisor, router.models)
    assert await other.states() == {"b": "idle", "fast": "idle"}
    assert (await other.ask("fast")).json()["model"] == "b"
    assert await other.states() == {"b": "loaded", "fast": "loaded"}
    file.write_text(file.read_text() + f'[[model]]\nmodel = "{router.models / "alpha"}"\nname = "a"\n')
    await serving.loader.reload()
    assert (await other.ask("a")).status_code == 200
    file.write_text("[[model]]\nname = 3\n")
    with pytest.raises(ConfigError, match="model must be"):
        await serving.loader.reload()
    assert set(await other.states()) == {"a", "b", "fast"}
    await other.http.aclose()
    await serving.app.state.responses.close()
    serving.app.state.router_state.access.close()
    await serving.close()
