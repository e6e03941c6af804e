"""Models that are loaded by their first request: real processes of `diptych serve --models-dir`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.model_files.tiny import make_tiny_model

from ..rig import wait_until
from .test_serve import Served

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FLAGS = ("--prefill", "0", "--kv-memory-gib", "0.05", "--threads", "1")
TWO_MODELS_GIB = "0.65"
"""Each needs 0.05 GiB of KV and 0.25 GiB in addition."""
LONG = 3000


class OnDemand:
    """A running service, and the folder of its models."""

    def __init__(self, folder: Path, *flags: str, names: tuple[str, ...]) -> None:
        self.folder = folder / "models"
        self.folder.mkdir()
        for seed, name in enumerate(names):
            make_tiny_model(self.folder / name, seed=seed)
        self.served = Served(folder / "serve.log", "--models-dir", str(self.folder), *FLAGS, *flags)
        self.http = httpx.Client(base_url=self.served.url, timeout=90, trust_env=False)

    def ask(self, model: str, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": model, "prompt": "hi", "max_tokens": 3} | fields)

    def generate(self, model: str, **fields: Any) -> dict[str, Any]:
        reply = self.http.post("/api/generate", json={"model": model, "stream": False} | fields)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    def states(self) -> dict[str, str]:
        listed = {one["id"]: one["state"] for one in self.http.get("/v1/models").json()["data"]}
        tagged = {one["name"]: one["state"] for one in self.http.get("/api/tags").json()["models"]}
        assert all(tagged[f"{path.name}:latest"] == listed[path.name] for path in self.folder.iterdir())
        return {path.name: listed[path.name] for path in self.folder.iterdir()}

    def loaded(self) -> dict[str, str]:
        """The loaded models and when they expire."""
        return {
            one["name"].removesuffix(":latest"): one["expires_at"] for one in self.http.get("/api/ps").json()["models"]
        }

    @contextmanager
    def stream(self, model: str) -> Iterator[Iterator[str]]:
        """A long answer that has begun."""
        body = {"model": model, "prompt": "hi", "max_tokens": LONG, "stream": True, "ignore_eos": True}
        with self.http.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data: {")
            yield lines

    def num_loads(self, model: str) -> int:
        return sum(f"model {model}: loading  bytes=" in line for line in self.served.output().splitlines())


@contextmanager
def running(folder: Path, *flags: str, names: tuple[str, ...]) -> Iterator[OnDemand]:
    service = OnDemand(folder, *flags, names=names)
    try:
        yield service
    finally:
        service.http.close()
        service.served.kill()


def test_models_come_by_their_first_request_and_go_for_others(tmp_path: Path) -> None:
    with running(tmp_path, "--max-memory-gib", TWO_MODELS_GIB, names=("alpha", "beta", "gamma")) as service:
        assert service.states() == {"alpha": "idle", "beta": "idle", "gamma": "idle"}
        assert service.loaded() == {}
        with ThreadPoolExecutor(2) as pool:
            replies = list(pool.map(service.ask, ("alpha", "alpha")))
        assert [reply.status_code for reply in replies] == [200, 200], replies[0].text
        assert service.num_loads("alpha") == 1

        def answers_until_loaded(model: str) -> None:
            """Stream from alpha until another model has answered."""
            with ThreadPoolExecutor(1) as pool:
                other = pool.submit(service.ask, model)
                while not other.done():
                    with service.stream("alpha") as lines:
                        text = list(lines)
                    assert "data: [DONE]" in text[-2:]
                    assert not any('"error"' in line for line in text)
                assert other.result().status_code == 200, other.result().text

        answers_until_loaded("beta")
        assert service.states() == {"alpha": "loaded", "beta": "loaded", "gamma": "idle"}
        answers_until_loaded("gamma")  # in place of beta, which is idle
        assert service.states() == {"alpha": "loaded", "beta": "idle", "gamma": "loaded"}
        assert service.num_loads("alpha") == 1

        with service.stream("alpha") as one, service.stream("gamma") as other:
            refused = service.ask("beta")
            assert refused.status_code == 503 and float(refused.headers["retry-after"]) >= 1
            message = refused.json()["error"]["message"]
            assert "'beta' needs 0.3 GB of memory. Of 0.7 GB for models" in message
            assert "alpha (0.3 GB)" in message and "gamma (0.3 GB)" in message
            assert "data: [DONE]" in list(one)[-2:] and "data: [DONE]" in list(other)[-2:]

        assert service.generate("gamma", prompt="hi", options={"num_predict": 3}, keep_alive=0)["response"]
        wait_until(lambda: set(service.loaded()) == {"alpha"}, "gamma is unloaded after its answer")
        assert service.generate("beta", keep_alive="-1m")["done_reason"] == "load"
        assert service.loaded()["beta"].startswith("9999") and not service.loaded()["alpha"].startswith("9999")
        assert service.generate("beta", keep_alive=0)["done_reason"] == "unload"
        assert service.generate("alpha", prompt="hi", keep_alive="500ms")["done"]
        wait_until(lambda: not service.loaded(), "both are unloaded")

        make_tiny_model(service.folder / "delta", seed=9)
        assert service.ask("delta").status_code == 200, "a new model needs no restart"
        assert service.served.end(signal.SIGTERM, whole_group=False) == set()


def test_a_load_that_fails_gives_the_reason_and_loaded_models_outlive_the_router(tmp_path: Path) -> None:
    with running(tmp_path, names=("alpha", "broken")) as service:
        weights = service.folder / "broken" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
        with ThreadPoolExecutor(3) as pool:
            replies = list(pool.map(service.ask, ["broken"] * 3))
        messages = {reply.json()["error"]["message"] for reply in replies}
        assert {reply.status_code for reply in replies} == {503}
        assert all("'broken' cannot be loaded: decode-0 exited while it loaded (exit status" in one for one in messages)
        assert all("model.safetensors" in one for one in messages), messages
        assert service.num_loads("broken") == 1
        assert [service.ask("broken").status_code for _ in range(4)] == [503] * 4
        assert service.num_loads("broken") < 1 + 4, "no attempt before the pause ends"

        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(service.ask, "alpha")
            wait_until(lambda: service.served.pid_of("decode-0"), "a worker that loads")
            os.kill(service.served.pid_of("decode-0"), signal.SIGKILL)
            killed = first.result()
        assert killed.status_code == 503 and "killed by signal 9" in killed.json()["error"]["message"]
        wait_until(lambda: service.ask("alpha").status_code == 200, "the next attempt loads it")

        loads = service.num_loads("alpha")
        router = next(pid for pid in service.served.members() if b"\0-m\0router\0" in command(pid))
        os.kill(router, signal.SIGKILL)
        wait_until(lambda: answers(service, "alpha"), "the next router")
        assert service.num_loads("alpha") == loads
        assert service.states()["alpha"] == "loaded"


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def answers(service: OnDemand, model: str) -> bool:
    try:
        return service.ask(model).status_code == 200
    except httpx.TransportError:
        return False
