"""Pauses, sleep and weight updates of real workers: which weights answer, and what happens to running requests."""

from __future__ import annotations

import hashlib
import http.client
import json
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.stack import Place
from common.model_files.tiny import make_tiny_model

from ..common.engine.models.generation import transformers_model
from ..rig import IS_OWN_ENGINE, System, make_stack, wait_until
from .conftest import Oracle

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

PATIENCE_S = 120.0
PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
NUM_TOKENS = 48
LONG = 1200


class Service:
    """A prefill worker and decode workers over a folder; prompts go through both pools."""

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

    def update_from_tensor(self, data: bytes, **query: Any) -> httpx.Response:
        headers = {"content-type": "application/octet-stream"}
        return self.client.post("/update_weights_from_tensor", params=query, headers=headers, content=data)

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
    home = tmp_path_factory.mktemp("router")
    # The router's temporary folder has a name that means another folder in all processes but decode-1.
    there = ("env", "-C", str(home))
    stack = make_stack(
        tmp_path_factory.mktemp("stack"), 1, 2 if IS_OWN_ENGINE else 1, model=str(weights["old"]),
        places={"router": Place((*there, "TMPDIR=/proc/self/cwd")), "decode-1": Place(there)} if IS_OWN_ENGINE else {},
        worker_flags=("--dtype", "float32", "--max-model-len", "2048"),
        router_flags=("--local-prefill-threshold", "0"),
    )  # fmt: skip
    stack.start()
    found = Service(System(stack))
    try:
        found.system.wait_for_workers()
        yield found
    finally:
        found.client.close()
        stack.stop()


@pytest.mark.own_engine
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


@pytest.mark.own_engine
@pytest.mark.parametrize(("folder", "why"), [("broken", "worker"), ("gemma", "config.json"), ("absent", "no such")])
def test_no_worker_changes_its_weights_if_they_cannot_be_loaded(
    service: Service, weights: dict[str, Path], folder: str, why: str
) -> None:
    before, version = service.text(), service.client.get("/weight_info").json()
    told = service.update(weights.get(folder, Path("/absent")))
    assert told.status_code == 400 and told.json()["error"]["param"] == "model_path" and why in told.text, told.text
    assert service.text() == before and service.client.get("/weight_info").json() == version


@pytest.mark.own_engine
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
    version = "default"
    if IS_OWN_ENGINE:
        version = "awake"
        assert service.update(weights["new"], weight_version=version).status_code == 200
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
    assert after.json()["choices"][0]["text"] == before and after.headers["x-weight-version"] == version
    service.system.settle()


@pytest.mark.own_engine
@pytest.mark.parametrize("source", ["disk", "tensor"])
def test_a_restarted_worker_gets_the_current_weights(service: Service, weights: dict[str, Path], source: str) -> None:
    assert service.update(weights["old"]).status_code == 200
    told = (
        service.update(weights["new"], weight_version="kept")
        if source == "disk"
        else service.update_from_tensor(tensors_of(weights["new"]), weight_version="kept")
    )
    assert told.status_code == 200, told.text
    before, stack = service.text(), service.system.stack
    for worker in list(stack.workers()):
        worker.kill()
        stack.restart(worker)
    after = service.complete()
    assert after.json()["choices"][0]["text"] == before and after.headers["x-weight-version"] == "kept"


# ---------------------------------------------------------------- from tensors


def tensors_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def with_head(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """A safetensors file with another header."""
    (length,) = struct.unpack("<Q", data[:8])
    head = json.loads(data[8 : 8 + length])
    change(head)
    encoded = json.dumps(head).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data[8 + length :]


def files_of(service: Service) -> list[Path]:
    """Files of weights that the router keeps."""
    command = service.system.stack.router.command
    return sorted(Path(command[command.index("-C") + 1]).glob("diptych-weights-*/*.safetensors"))


@pytest.mark.own_engine
def test_tensors_reach_workers_without_a_shared_folder(
    service: Service, weights: dict[str, Path], random_prompts: Any
) -> None:
    """decode-1 links the router's file, and the other two pull it."""
    assert service.update(weights["old"]).status_code == 200
    data, workers = tensors_of(weights["new"]), service.system.stack.workers()
    before = {worker.name: worker.log.read_text().count("received weights") for worker in workers}
    told = service.update_from_tensor(data, weight_version="tensors", sha256=hashlib.sha256(data).hexdigest())
    assert told.status_code == 200, told.text
    assert (told.json()["num_workers"], told.json()["weight_version"], told.json()["success"]) == (3, "tensors", True)
    pulls = {worker.name: worker.log.read_text().count("received weights") - before[worker.name] for worker in workers}
    assert pulls == {"prefill-0": 1, "decode-0": 1, "decode-1": 0}
    oracle = Oracle(transformers_model(weights["new"]))
    prompts = random_prompts((17, 33, 90, 200), vocab_size=256, seed=5)
    assert service.system.generate(prompts, max_tokens=24) == [oracle.greedy(prompt, 24) for prompt in prompts]
    assert service.complete().headers["x-weight-version"] == "tensors"
    service.system.settle()


@pytest.mark.own_engine
def test_other_tensors_change_nothing(service: Service, weights: dict[str, Path]) -> None:
    data, norm = tensors_of(weights["old"]), "model.norm.weight"
    assert service.update_from_tensor(tensors_of(weights["new"]), weight_version="before").status_code == 200
    before, kept = service.text(), files_of(service)
    (length,) = struct.unpack("<Q", data[:8])
    shape = json.loads(data[8 : 8 + length])[norm]["shape"]
    for body, query, why in (
        (with_head(data, lambda head: head[norm].update(dtype="I32")), {}, f"tensor {norm} is 'I32'"),
        (with_head(data, lambda head: head[norm].update(shape=[1, *shape])), {}, f"tensor {norm} is 'F32' of shape"),
        (with_head(data, lambda head: head.update(x=head.pop(norm))), {}, f"tensors are missing: {norm}"),
        (data[:-4], {}, "is damaged"),
        (data, {"sha256": "0" * 64}, "sha256: the body has"),
        (b"\x80\x04\x95" + data, {}, "is not a safetensors file. Pickled"),
    ):
        told = service.update_from_tensor(body, **query)
        assert told.status_code == 400 and why in told.json()["error"]["message"], told.text
    sender = http.client.HTTPConnection("127.0.0.1", service.system.stack.port, timeout=PATIENCE_S)
    headers = {"content-type": "application/octet-stream", "content-length": str(10**12)}
    sender.request("POST", "/update_weights_from_tensor", headers=headers)
    assert sender.getresponse().status == 413
    sender.close()
    assert service.text() == before and files_of(service) == kept
    assert len(kept) == 1 and service.client.get("/weight_info").json() == {"weight_version": "before"}


@pytest.mark.own_engine
def test_a_worker_that_dies_during_an_update_returns_with_the_weights_of_the_others(
    service: Service, weights: dict[str, Path]
) -> None:
    stack = service.system.stack
    assert service.update(weights["old"], weight_version="old").status_code == 200
    texts = {"old": service.text()}
    victim = next(worker for worker in stack.workers() if worker.name == "decode-0")
    num_staged = victim.log.read_text().count("staged weights tensors")
    with ThreadPoolExecutor() as pool:
        running = service.begin(pool)  # for which the update waits after all workers have staged the weights
        updating = pool.submit(service.update_from_tensor, tensors_of(weights["new"]), weight_version="new")
        wait_until(lambda: victim.log.read_text().count("staged weights tensors") > num_staged, "staged", PATIENCE_S)
        victim.kill()
        told = updating.result()
        assert told.status_code == 200 or told.json()["error"]["message"], told.text
        running.result()
    version = service.client.get("/weight_info").json()["weight_version"]
    assert version == ("new" if told.status_code == 200 else "old")
    texts[version] = service.text()
    stack.restart(victim)
    service.system.wait_for_workers()
    for _ in range(6):  # on both decode workers
        reply = service.complete()
        assert reply.json()["choices"][0]["text"] == texts[version] and reply.headers["x-weight-version"] == version
    assert texts["old"] != texts.get("new")


@pytest.mark.own_engine
def test_tensors_outlive_their_router_on_running_workers_only(service: Service, weights: dict[str, Path]) -> None:
    stack = service.system.stack
    assert service.update_from_tensor(tensors_of(weights["new"]), weight_version="new").status_code == 200
    new = service.text()
    stack.router.kill()
    stack.restart(stack.router)
    stack.wait_ready(time.monotonic() + PATIENCE_S)
    assert service.text() == new and service.client.get("/weight_info").json() == {"weight_version": "new"}
    victim = next(worker for worker in stack.workers() if worker.name == "decode-0")
    victim.kill()
    stack.restart(victim)
    wait_until(lambda: "no router sent weights" in victim.log.read_text(), "the worker gives up", PATIENCE_S)
    assert service.text() == new
    told = service.update_from_tensor(tensors_of(weights["old"]), weight_version="old")
    assert told.status_code == 200, told.text
    wait_until(lambda: "weights changed to version old" in victim.log.read_text(), "the worker joins", PATIENCE_S)
    assert service.text() != new
