"""Pauses, sleep and weight updates of real workers: which weights answer, and what happens to running requests."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.model_files.tiny import make_tiny_model

from ..rig import IS_OWN_ENGINE, System, make_stack, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

PATIENCE_S = 120.0
PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
NUM_TOKENS = 48
LONG = 1200


class Service:
    """A prefill worker and two decode workers over a folder; prompts go through both pools."""

    def __init__(self, system: System) -> None:
        self.system, self.url = system, system.stack.url
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S, trust_env=False)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body or None)

    def complete(self, prompt: str = PROMPT, num_tokens: int = NUM_TOKENS, **more: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, **more}
        with httpx.Client(base_url=self.url, timeout=PATIENCE_S, trust_env=False) as client:
            return client.post("/v1/completions", json=body)

    def text(self) -> str:
        reply = self.complete()
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])

    def update(self, folder: Path, **more: Any) -> httpx.Response:
        return self.post("/update_weights_from_disk", model_path=str(folder), **more)

    def begin(self, pool: ThreadPoolExecutor, **more: Any) -> Future[httpx.Response]:
        """Start a long answer, and return once a worker computes it."""
        before = self.running()
        future = pool.submit(self.complete, num_tokens=LONG, **more)
        wait_until(lambda: self.running() > before, "a request runs", PATIENCE_S)
        return future

    def running(self) -> int:
        load = self.client.get("/load").json()
        return sum(worker["num_requests"] for worker in load["workers"] if worker["role"] == "decode")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("weights")
    found = {name: make_tiny_model(home / name, seed=seed) for seed, name in enumerate(("old", "new"), 21)}
    broken = found["broken"] = home / "broken"
    shutil.copytree(found["new"], broken)
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[: len(data) // 2])
    found["gemma"] = make_tiny_model(home / "gemma", architecture="gemma3")
    return found


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, Path]) -> Iterator[Service]:
    stack = make_stack(
        tmp_path_factory.mktemp("stack"), 1, 2, model=str(weights["old"]),
        worker_flags=("--dtype", "float32", "--max-model-len", "2048"),
        router_flags=("--local-prefill-threshold", "0"),
    )  # fmt: skip
    stack.start()
    found = Service(System(stack))
    try:
        yield found
    finally:
        found.client.close()
        stack.stop()


def test_all_workers_change_their_weights_and_caches_do_not_mix(service: Service, weights: dict[str, Path]) -> None:
    """A prompt cached under the old weights gets the answer of the new ones, and of the old ones after the way back."""
    first = service.complete()
    old = first.json()["choices"][0]["text"]
    assert first.headers["x-weight-version"] == "default" and "metadata" not in first.json()
    assert service.text() == old
    told = service.update(weights["new"], weight_version="step-1")
    assert told.status_code == 200, told.text
    assert (told.json()["num_workers"], told.json()["weight_version"], told.json()["success"]) == (3, "step-1", True)
    after = service.complete()
    new = after.json()["choices"][0]["text"]
    assert new != old and after.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert after.headers["x-weight-version"] == "step-1" and after.json()["metadata"] == {"weight_version": "step-1"}
    assert service.client.get("/weight_info").json() == {"weight_version": "step-1"}
    messages = [{"role": "user", "content": "Hello"}]
    with service.client.stream(
        "POST", "/v1/chat/completions", json={"messages": messages, "stream": True, "max_tokens": 3}
    ) as s:
        assert s.headers["x-weight-version"] == "step-1"
        assert '"metadata":{"weight_version":"step-1"}' in next(line for line in s.iter_lines() if line)
    assert service.update(weights["old"], weight_version="step-2").status_code == 200
    assert service.text() == old
    service.system.settle()


@pytest.mark.parametrize(("folder", "why"), [("broken", "worker"), ("gemma", "config.json"), ("absent", "no such")])
def test_no_worker_changes_its_weights_if_they_cannot_be_loaded(
    service: Service, weights: dict[str, Path], folder: str, why: str
) -> None:
    before, version = service.text(), service.client.get("/weight_info").json()
    told = service.update(weights.get(folder, Path("/absent")))
    assert told.status_code == 400 and told.json()["error"]["param"] == "model_path" and why in told.text, told.text
    assert service.text() == before and service.client.get("/weight_info").json() == version


def test_a_running_answer_ends_on_the_old_weights_and_a_later_one_waits(
    service: Service, weights: dict[str, Path]
) -> None:
    assert service.update(weights["old"], weight_version="old").status_code == 200
    whole = service.complete(num_tokens=LONG).json()["choices"][0]["text"]
    with ThreadPoolExecutor() as pool:
        running = service.begin(pool)
        updating = pool.submit(service.update, weights["new"], weight_version="new")
        assert updating.result().status_code == 200
        assert running.result().json()["choices"][0]["text"] == whole
        assert running.result().headers["x-weight-version"] == "old"
        assert service.complete().headers["x-weight-version"] == "new"


def test_pause_ends_waits_for_or_keeps_running_answers(service: Service) -> None:
    whole = service.complete(num_tokens=LONG).json()["choices"][0]["text"]
    with ThreadPoolExecutor() as pool:
        running = service.begin(pool)
        assert service.client.post("/pause").json() == {"status": "paused"}
        aborted = running.result().json()["choices"][0]
        assert aborted["finish_reason"] == "abort" and whole.startswith(aborted["text"]) and aborted["text"] != whole
        assert service.client.get("/is_paused").json() == {"is_paused": True}
        waiting = pool.submit(service.complete)
        assert not threading.Event().wait(0.5) and not waiting.done()
        assert service.client.post("/resume").status_code == 200
        assert waiting.result().status_code == 200

        running = service.begin(pool)
        assert service.client.post("/pause", params={"mode": "wait"}).status_code == 200
        assert running.done() and running.result().json()["choices"][0]["text"] == whole
        service.client.post("/resume")

        if IS_OWN_ENGINE:
            running = service.begin(pool)
            assert service.client.post("/pause", params={"mode": "keep"}).status_code == 200
            assert not threading.Event().wait(2.5) and not running.done()
            assert service.update(Path("/any")).status_code == 400
            assert service.client.post("/resume").status_code == 200
            assert running.result().json()["choices"][0]["text"] == whole
    assert service.client.post("/pause", params={"mode": "later"}).status_code == 400
    service.system.settle()


def test_sleep_frees_memory_and_waking_up_serves_the_same_weights(service: Service, weights: dict[str, Path]) -> None:
    assert service.update(weights["new"], weight_version="awake").status_code == 200
    before, workers = service.text(), list(service.system.stack.workers())
    assert service.client.post("/sleep", params={"level": 1}).json() == {"status": "sleeping", "level": 1}
    assert service.client.get("/is_sleeping").json() == {"is_sleeping": True}
    for worker in workers:
        health = httpx.get(f"{worker.http_url}/health", trust_env=False)
        assert health.status_code == 200 and health.json()["state"] == "asleep", health.text
    assert service.update(weights["old"]).status_code == 400
    assert service.client.get("/ready").status_code == 503
    assert service.client.post("/wake_up", params={"tags": "weights"}).status_code == 400
    assert service.client.post("/wake_up").json() == {"status": "awake"}
    after = service.complete()
    assert after.json()["choices"][0]["text"] == before and after.headers["x-weight-version"] == "awake"


def test_a_restarted_worker_gets_the_current_weights(service: Service, weights: dict[str, Path]) -> None:
    assert service.update(weights["new"], weight_version="kept").status_code == 200
    before, stack = service.text(), service.system.stack
    for worker in list(stack.workers()):
        worker.kill()
        stack.restart(worker)
    after = service.complete()
    assert after.json()["choices"][0]["text"] == before and after.headers["x-weight-version"] == "kept"
