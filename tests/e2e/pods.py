"""A router and worker processes as a cluster would run them, what its API server says of them, and clients."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from benchmarks.stack import StackProcess, free_port
from common.wire.listening import in_url

from ..kubernetes_api import KubernetesAPI

MODEL = "tiny-random"
NUM_TOKENS = 60
PATIENCE_S = 150.0


class Pods:
    """A router and worker processes, and what Kubernetes would say of them."""

    def __init__(self, folder: Path, host: str = "127.0.0.1", listen: str = "") -> None:
        """`host`: where everybody is reached; `listen`: what everybody binds, when it is another."""
        self.folder, self.host, self.listen = folder, host, listen or host
        self.api = KubernetesAPI(folder / "serviceaccount").start()
        self.processes: list[StackProcess] = []
        self.num_started = 0
        self.port = free_port()
        self.url = f"http://{in_url(host)}:{self.port}"
        self.router: StackProcess | None = None

    def start_router(self, *discovery: str) -> None:
        port, api, folder = str(self.port), self.api.url, str(self.api.folder)
        flags: tuple[str, ...] = ("--host", self.listen, "--port", port)
        flags += ("--kubernetes-api", api, "--kubernetes-credentials", folder)
        flags += ("--queue-timeout-s", "140", "--local-prefill-threshold", "0")
        flags += ("--slo-ttft-ms", "600000", "--slo-tpot-ms", "600000")
        self.router = self._start("router", "router", *flags, *discovery)

    def _start(self, name: str, module: str, *flags: str, env: dict[str, str] | None = None) -> StackProcess:
        command = [sys.executable, "-P", "-m", module, "--model", MODEL, *flags]
        process = StackProcess(name, name.partition("-")[0], command, self.folder / f"{name}.log")
        process.start(env={**os.environ, **(env or {})})
        self.processes.append(process)
        return process

    def add(self, role: str) -> StackProcess:
        """A worker: first not ready, as kubelet says while its probe fails, then ready."""
        self.num_started += 1
        name = f"{role}-{self.num_started}"
        worker = self._start(
            name,
            *(f"{role}_worker", "--worker-id", name, "--address-file", str(self.folder / f"{name}.json")),
            *("--host", self.listen, "--advertise-host", self.host, "--allow-remote"),
            *("--dtype", "float32", "--kv-memory-gib", "0.1", "--threads", "1", "--drain-timeout-s", "60"),
            *("--pod-deletion-cost", "--kubernetes-api", self.api.url),
            *("--kubernetes-credentials", str(self.api.folder)),
            env={"POD_NAME": name},
        )
        worker.wait_for_addresses(time.monotonic() + PATIENCE_S)
        self.api.put_worker(role, worker.addresses["address"], ready=False, serving=False)
        until(lambda: answers(f"{worker.http_url}/ready"), f"{name} is ready")
        self.api.put_worker(role, worker.addresses["address"])
        return worker

    def end(self, worker: StackProcess) -> None:
        """What a deleted pod goes through: terminating, SIGTERM, gone."""
        self.api.put_worker(worker.role, worker.addresses["address"], ready=False, serving=True, terminating=True)
        worker.send_signal(signal.SIGTERM)
        worker.wait(time.monotonic() + PATIENCE_S)
        assert not worker.forced and worker.returncode == 0, worker.log_tail()
        self.api.delete_worker(worker.role, worker.addresses["address"])

    def metric(self, name: str, *labels: str) -> list[float]:
        text = get(f"{self.url}/metrics").text
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return [float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in labels)]

    def check_blocks(self) -> None:
        """No worker that is left owns a block, once all is quiet."""
        left = [process for process in self.processes if process.alive and process is not self.router]

        def owned() -> list[int]:
            replies = [get(f"{worker.http_url}/health") for worker in left]
            return [reply.json()["blocks"]["owned"] for reply in replies]

        until(lambda: owned() == [0] * len(left), "every block is free")

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        deadline = time.monotonic() + PATIENCE_S
        for process in self.processes:
            process.wait(deadline)
        self.api.stop()
        assert not [process.name for process in self.processes if process.forced]


class Load:
    """Clients that ask the same prompts again and again, until they are told to stop."""

    def __init__(self, url: str, prompts: list[list[int]]) -> None:
        self.url, self.prompts = url, prompts
        self.answers: list[tuple[int, list[int]]] = []
        self.errors: list[str] = []
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask_on, args=(i,), daemon=True) for i in range(len(prompts))]
        for thread in self._threads:
            thread.start()

    def _ask_on(self, index: int) -> None:
        while not self._stopping.is_set():
            try:
                self.answers.append((index, complete(self.url, self.prompts[index])))
            except (AssertionError, httpx.HTTPError) as error:
                self.errors.append(repr(error))

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a request hangs"

    def more(self) -> None:
        """Wait until every prompt was answered again."""
        before = len(self.answers)
        until(lambda: self.errors or len(self.answers) >= before + 2 * len(self.prompts), "requests are answered")


def complete(url: str, prompt: list[int]) -> list[int]:
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
    body["return_token_ids"] = True
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False)
    assert reply.status_code == 200, reply.text
    return list(reply.json()["choices"][0]["token_ids"])


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=30.0, trust_env=False)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.05)
