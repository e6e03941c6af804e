"""Real processes for tests: single programs, whole stacks of workers and routers, and workers with faults.

`launch` (tests/conftest.py) starts programs. `systems` and `system_of` (tests/e2e/conftest.py) and `stacks`
(tests/chaos/conftest.py) start stacks that `make_stack` describes.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.stack import Stack, StackProcess, StackSettings
from common.machine.child_process import ChildProcess

from . import waiting

MODEL = "tiny-random"
PROMPT = "The quick brown fox jumps over the lazy dog. " * 4  # one token a byte
POLL_S = 0.02
PATIENCE_S = 60.0
PROBE_TIMEOUT_S = 30.0
READY_S = 300.0
"""The first workers on a machine compile their kernels."""
REQUEST_TIMEOUT_S = 900.0
WORKER_FLAGS = ("--kv-memory-gib", "0.1", "--threads", "1")
ENGINE = os.environ.get("TEST_ENGINE", "diptych")
"""Engine of the workers of all stacks. `TEST_ENGINE=vllm pytest ...` runs tests with vLLM, in its environment."""
ENGINE_SETTINGS: dict[str, dict[str, Any]] = {
    "diptych": {},
    "vllm": {"quantization": "auto", "env": {"DIPTYCH_ENGINE": "vllm", "DIPTYCH_ENGINE_ARGS": "--enforce-eager"}},
}
"""Settings of stacks by engine."""
IS_OWN_ENGINE = ENGINE == "diptych"
"""Whether a seed repeats an answer wherever it is computed, and log probabilities do not depend on the batch."""


class Program(ChildProcess):
    """A child process with a log. The fixture `launch` starts it, and kills it after the test."""

    log: Path

    def output(self) -> str:
        """Everything that it has printed so far."""
        return self.log.read_text(errors="replace")

    def wait_for_line(self, word: str, timeout_s: float = 60.0) -> str:
        """Return the first complete line that contains `word`. Fails with the output after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            is_running = self.alive and time.monotonic() < deadline  # before the output is read: its last words count
            for line in self.output().splitlines(keepends=True):
                if word in line and line.endswith("\n"):
                    return line.strip()
            assert is_running, f"{self.name} has not printed {word!r}\n{self.output()}"
            time.sleep(POLL_S)


def wait_until(true: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    """Ask processes, which takes longer than a look at this one, until a condition is true. See `waiting`."""
    waiting.wait_until(true, what, patience_s, meanwhile=lambda: time.sleep(POLL_S))


def make_stack(
    folder: Path,
    prefill: int = 1,
    decode: int = 1,
    *,
    model: str = MODEL,
    worker_flags: Sequence[str] = (),
    **settings: Any,
) -> Stack:
    """Workers with small caches, and routers, not started yet. Logs are written to `folder`.

    `settings` are those of `StackSettings`.
    """
    settings = {"ready_timeout_s": READY_S, **ENGINE_SETTINGS[ENGINE], **settings, "worker_flags": worker_flags}
    if ENGINE == "vllm":
        for name in ("worker_flags", "prefill_flags", "decode_flags"):
            settings[name] = flags_for_vllm(settings.get(name, ()))
    settings["worker_flags"] = (*WORKER_FLAGS, *settings["worker_flags"])
    return Stack(StackSettings(prefill, decode, model=model, log_dir=folder, **settings))


def flags_for_vllm(flags: Sequence[str]) -> tuple[str, ...]:
    """Flags of a worker with pairs of name and value, without what vLLM does not have, in units that it accepts."""
    values = dict(zip(flags[::2], flags[1::2], strict=True))
    for name in ("--watermark", "--local-prefill-chunk", "--max-draft-tokens", "--block-size"):
        values.pop(name, None)
    if (given := values.get("--num-blocks")) is not None:  # of 16 tokens; vLLM's have 128 on a CPU
        num_blocks = -(-int(given) // 8)
        values["--max-model-len"] = str(min(4096, num_blocks * 128))
        values["--num-blocks"] = str(num_blocks + 1)
    if int(values.get("--max-num-batched-tokens", "64")) < 64:
        values |= {"--max-num-batched-tokens": "64", "--max-num-seqs": "16"}
    return tuple(word for pair in values.items() for word in pair)


def make_tiny_models_for_vllm() -> None:
    """Write all tiny random models with larger heads from now on, because vLLM's kernels for CPUs need them."""
    from common.model_files import tiny
    from common.model_files.resolve import resolve_model

    os.environ["DIPTYCH_CACHE"] = tempfile.mkdtemp(prefix="diptych-tests-")
    tiny.HEAD_DIM = 32  # also for the models that tests write
    for name in ("tiny-random", "tiny-random-gemma3"):
        resolve_model(name)


# ---------------------------------------------------------------- requests and probes


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    """A greedy completion that ignores the end token. Fails unless the status is 200."""
    reply = client.post("/v1/completions", json={"model": MODEL, "temperature": 0, "ignore_eos": True, **body})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def owned(stack: Stack) -> dict[str, int]:
    """Number of blocks that requests own, by worker."""
    urls = {worker.name: f"{worker.http_url}/health" for worker in stack.workers()}
    replies = {name: httpx.get(url, trust_env=False, timeout=PROBE_TIMEOUT_S) for name, url in urls.items()}
    return {name: reply.json()["blocks"]["owned"] for name, reply in replies.items()}


def samples(worker: StackProcess, name: str, label: str = "") -> list[float]:
    """Values of a metric of a process, of the series that have `label`."""
    text = httpx.get(f"{worker.http_url}/metrics", timeout=PROBE_TIMEOUT_S, trust_env=False).text
    return [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith((f"{name}{{", f"{name} ", f"{name}_total{{", f"{name}_total ")) and label in line
    ]


def why_busy(worker: StackProcess) -> str:
    """Why a worker is not healthy and empty, from its own probe; "" if it is.

    A worker that was resumed reports that it is stuck until its engine has taken a step.
    """
    reply = httpx.get(f"{worker.http_url}/health", timeout=PROBE_TIMEOUT_S, trust_env=False)
    if reply.status_code != 200:
        return f"not healthy: {reply.text}\n{worker.log_tail()}"
    if "blocks" not in reply.json():
        return f"starting: {reply.text}"
    blocks: dict[str, int] = reply.json()["blocks"]
    return f"owns blocks: {blocks}" if blocks["owned"] else ""


# ---------------------------------------------------------------- a stack and its requests


@dataclass
class System:
    """A running stack, and how tests send requests to it."""

    stack: Stack
    flags: tuple[str, ...] = ()
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def generate(self, prompts: Sequence[list[int]], *, at_once: int = 32, **params: Any) -> list[list[int]]:
        """Output token ids of each prompt, greedy by default, with up to `at_once` requests in flight."""
        return asyncio.run(self._generate(prompts, at_once, params))

    async def _generate(self, prompts: Sequence[list[int]], at_once: int, params: dict[str, Any]) -> list[list[int]]:
        gate = asyncio.Semaphore(at_once)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.stack.url, timeout=REQUEST_TIMEOUT_S, limits=limits) as client:

            async def one(prompt: list[int]) -> list[int]:
                body = {"model": self.stack.model, "prompt": prompt, "temperature": 0, "ignore_eos": True}
                async with gate:
                    reply = await client.post("/v1/completions", json={**body, "return_token_ids": True, **params})
                assert reply.status_code == 200, reply.text
                self.bodies.append(reply.json())
                return list(reply.json()["choices"][0]["token_ids"])

            return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    def metric(self, name: str, role: str = "") -> float:
        """The sum of a metric's samples over the workers of a role."""
        return sum(value for worker in self.stack.workers(role) for value in samples(worker, name))

    def transfers(self, transport: str) -> float:
        """Number of prompts that decode workers received with a transport, such as "shm" or "tcp"."""
        label, metric = f'transport="{transport}"', "diptych_kv_transfers"
        return sum(value for worker in self.stack.workers("decode") for value in samples(worker, metric, label))

    def requests_of(self, worker: StackProcess) -> float:
        """Number of requests that a worker completed."""
        return sum(samples(worker, "vllm:request_success"))

    def wait_for_workers(self) -> None:
        """Wait until every router may use every worker: a router is ready with decode workers only."""
        ready = {f'worker="{worker.name}"' for worker in self.stack.workers()}
        for router in self.stack.routers:
            deadline = time.monotonic() + READY_S
            while not all(any(name in line for line in self._ready_lines(router)) for name in ready):
                assert time.monotonic() < deadline, f"not all of {sorted(ready)} are ready\n{router.log_tail()}"
                time.sleep(POLL_S)

    @staticmethod
    def _ready_lines(router: StackProcess) -> list[str]:
        page = httpx.get(f"{router.http_url}/metrics", timeout=PROBE_TIMEOUT_S, trust_env=False).text
        lines = [line for line in page.splitlines() if line.startswith("diptych_worker_state")]
        return [line for line in lines if 'state="ready"' in line and not line.endswith(" 0.0")]

    def settle(self) -> None:
        """Wait until every worker is healthy and owns no block. Fails with the reasons after PATIENCE_S."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            state = {worker.name: why_busy(worker) for worker in self.stack.workers() if worker.alive}
            if not any(state.values()):
                return
            time.sleep(0.05)
        pytest.fail(f"{PATIENCE_S:g} s after the last request: {state}")


class TwoModels:
    """A stack with a prefill and a decode worker for each of two models, `first` and `second`.

    `headers` are sent with each request.
    """

    NUM_TOKENS = 12

    def __init__(self, stack: Stack, folders: dict[str, Path], headers: dict[str, str] | None = None) -> None:
        self.stack, self.folders = stack, folders
        self.http = httpx.Client(base_url=stack.url, timeout=120, trust_env=False, headers=headers)

    def workers(self, model: str) -> list[StackProcess]:
        return [one for one in self.stack.workers() if str(self.folders[model]) in one.command]

    def ask(self, model: str, prompt: list[int], **headers: str) -> httpx.Response:
        body = {"model": model, "prompt": prompt, "max_tokens": self.NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        return self.http.post("/v1/completions", json=body | {"return_token_ids": True}, headers=headers)

    def tokens(self, model: str, prompt: list[int]) -> list[int]:
        reply = self.ask(model, prompt)
        assert reply.status_code == 200, reply.text
        assert reply.json()["model"] == model
        return list(reply.json()["choices"][0]["token_ids"])

    def wait_ready(self, model: str, status: int = 200) -> None:
        url = f"/ready?model={model}"
        wait_until(lambda: self.http.get(url).status_code == status, f"{url} answers {status}", READY_S)

    def wait_for_workers(self) -> None:
        """Wait until every worker serves: a router is ready with decode workers only."""

        def are_ready() -> bool:
            states = [worker["state"] for worker in self.http.get("/load").json()["workers"]]
            return states == ["ready"] * len(self.stack.workers())

        wait_until(are_ready, "all workers are ready", READY_S)


def make_stack_of_two(folders: dict[str, Path], router_flags: tuple[str, ...], log_dir: Path) -> Stack:
    """Workers `prefill-0` and `decode-0` of the first model, `prefill-1` and `decode-1` of the second."""
    first, second = (str(folder) for folder in folders.values())
    flags = (*router_flags, "--local-prefill-threshold", "0", "--queue-timeout-s", "90")
    stack = make_stack(log_dir, 2, 2, model=first, router_flags=flags)
    for worker in stack.workers():
        if worker.name.endswith("-1"):
            worker.command[worker.command.index(first)] = second
    router = stack.router.command  # `router_flags` name a file of both models
    del router[router.index("--model") : router.index("--model") + 2]
    return stack


# ---------------------------------------------------------------- workers with faults


def command_with_faults(role: str, *flags: str, **faults: object) -> list[str]:
    """The command of a worker of `role` with the faults of tests/faulty_worker.py. `_` in names stands for `-`."""
    named = [f"{name.replace('_', '-')}={value}" for name, value in faults.items()]
    return [sys.executable, "-P", str(Path(__file__).with_name("faulty_worker.py")), role, *named, *flags]


def make_faulty(worker: StackProcess, *flags: str, **faults: object) -> None:
    """Give a worker faults, and more flags, from its next start on."""
    own = worker.command[worker.command.index("-m") + 2 :]
    worker.command = command_with_faults(worker.role, *flags, *own, **faults)


@contextmanager
def faulty(stack: Stack, worker: StackProcess, **faults: object) -> Iterator[None]:
    """Restart a worker with faults, and again without them at the end."""
    command = worker.command
    worker.kill()
    make_faulty(worker, **faults)
    stack.restart(worker)
    try:
        yield
    finally:
        worker.kill()
        worker.command = command
        stack.restart(worker)
