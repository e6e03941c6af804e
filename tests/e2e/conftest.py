"""Whole systems of real processes, shared by the tests that need the same one and checked for leaks after each test."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from benchmarks.stack import Stack, StackProcess, StackSettings
from common.model_files.resolve import resolve_model

SETTLE_S = 60.0
PROBE_TIMEOUT_S = 30.0
READY_S = 300.0
"""The first workers on a machine compile their kernels."""
REQUEST_TIMEOUT_S = 900.0


def prompts_of(lengths: Sequence[int], *, vocab_size: int, seed: int) -> list[list[int]]:
    """Random prompts that share no prefix."""
    source = random.Random(seed)
    return [[source.randrange(vocab_size) for _ in range(length)] for length in lengths]


@dataclass
class System:
    """A running stack and how a test talks to it."""

    stack: Stack
    flags: tuple[str, ...] = ()
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def generate(self, prompts: Sequence[list[int]], *, at_once: int = 32, **params: Any) -> list[list[int]]:
        """Output token ids of each prompt, greedy unless told otherwise, `at_once` of them in flight."""
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
        """Prompts that decode workers got through shared memory ("shm") or over TCP ("tcp")."""
        label = f'transport="{transport}"'
        return sum(
            value for worker in self.stack.workers("decode") for value in samples(worker, "diptych_kv_transfers", label)
        )

    def requests_of(self, worker: StackProcess) -> float:
        """Requests that ended well on one worker."""
        return sum(samples(worker, "vllm:request_success"))

    def wait_for_workers(self) -> None:
        """Until every router may use every worker: a router is ready with a decode worker alone."""
        ready = {f'worker="{worker.name}"' for worker in self.stack.workers()}
        for router in self.stack.routers:
            deadline = time.monotonic() + READY_S
            while not all(any(name in line for line in self._ready_lines(router)) for name in ready):
                assert time.monotonic() < deadline, f"not all of {sorted(ready)} are ready\n{router.log_tail()}"
                time.sleep(0.02)

    @staticmethod
    def _ready_lines(router: StackProcess) -> list[str]:
        page = httpx.get(f"{router.http_url}/metrics", timeout=PROBE_TIMEOUT_S, trust_env=False).text
        lines = [line for line in page.splitlines() if line.startswith("diptych_worker_state")]
        return [line for line in lines if 'state="ready"' in line and not line.endswith(" 0.0")]

    def settle(self) -> None:
        """Wait until every worker is healthy and owns no block. Fails with what they say if that does not happen."""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            state = {worker.name: holding(worker) for worker in self.stack.workers() if worker.alive}
            if not any(state.values()):
                return
            time.sleep(0.05)
        pytest.fail(f"{SETTLE_S:g} s after the last request: {state}")


def samples(worker: StackProcess, name: str, label: str = "") -> list[float]:
    text = httpx.get(f"{worker.http_url}/metrics", timeout=PROBE_TIMEOUT_S, trust_env=False).text
    return [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith((f"{name}{{", f"{name} ", f"{name}_total{{")) and label in line
    ]


def holding(worker: StackProcess) -> str:
    """What keeps a worker from being healthy and empty, as its own probe tells it; "" when nothing does.

    One that has just woken up calls itself stuck until its engine has turned.
    """
    reply = httpx.get(f"{worker.http_url}/health", timeout=PROBE_TIMEOUT_S, trust_env=False)
    if reply.status_code != 200:
        return f"not healthy: {reply.text}\n{worker.log_tail()}"
    if "blocks" not in reply.json():
        return f"starting: {reply.text}"
    blocks: dict[str, int] = reply.json()["blocks"]
    return f"owns blocks: {blocks}" if blocks["owned"] else ""


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    """Closes what a test enters, as clients of SDKs: their connections would outlive it."""
    with ExitStack() as stack:
        yield stack


Systems = Callable[..., System]


@pytest.fixture(scope="module")
def systems(tmp_path_factory: pytest.TempPathFactory, forge: None) -> Iterator[Systems]:
    """Starts a system, or gives back the module's running one with the same shape; at most one runs at a time."""
    running: dict[str, System] = {}

    def stop_all() -> None:
        for system in running.values():
            system.stack.stop()
        running.clear()

    def start(prefill: int = 1, decode: int = 1, *, model: str = "tiny-random", **options: Any) -> System:
        key = repr((prefill, decode, model, sorted(options.items())))
        if key not in running:
            stop_all()
            worker_flags = ("--kv-memory-gib", "0.1", "--threads", "1", *options.pop("worker_flags", ()))
            stack = Stack(
                StackSettings(
                    prefill,
                    decode,
                    model=model,
                    worker_flags=worker_flags,
                    log_dir=tmp_path_factory.mktemp("stack"),
                    ready_timeout_s=READY_S,
                    **options,
                )
            )
            stack.start()
            running[key] = System(stack)
            running[key].wait_for_workers()
        return running[key]

    yield start
    stop_all()


@pytest.fixture(autouse=True)
def a_gpu_shares_no_host_memory(request: pytest.FixtureRequest) -> None:
    call = getattr(request.node, "callspec", None)
    if call is not None and call.params.get("transport") == "shm" and os.environ.get("DIPTYCH_DEVICE", "cpu") != "cpu":
        pytest.skip("blocks of a GPU travel over sockets only")


@pytest.fixture
def system_of(systems: Systems) -> Iterator[Systems]:
    """Like `systems`; after the test no worker of a system it used may own a block, and all must be healthy."""
    used: list[System] = []

    def use(*arguments: Any, **options: Any) -> System:
        used.append(systems(*arguments, **options))
        return used[-1]

    yield use
    for system in used:
        if system.stack.router.alive:  # a later system of the same test ended the earlier ones
            system.settle()


@pytest.fixture
def stack(system_of: Any) -> Stack:
    """One prefill and one decode worker; every prompt goes through both."""
    found: Stack = system_of(router_flags=("--local-prefill-threshold", "0")).stack
    return found


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture(scope="session")
def random_prompts() -> Callable[..., list[list[int]]]:
    return prompts_of


class Oracle:
    """Hugging Face `transformers`, one prompt at a time: what greedy generation must give."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        with torch.inference_mode():
            output = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        return [int(token) for token in output[0, len(prompt) :]]

    def logprobs(self, prompt: list[int]) -> torch.Tensor:
        """Log-probabilities float32 [len(prompt) - 1, vocab] of what follows each token but the last."""
        with torch.inference_mode():
            return torch.log_softmax(self.model(torch.tensor([prompt])).logits[0, :-1].float(), dim=-1)


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    return resolve_model("tiny-random").weights[0].parent


@pytest.fixture(scope="session")
def tiny_oracle(tiny_folder: Path) -> Oracle:
    from transformers import AutoModelForCausalLM

    return Oracle(AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32))


def gguf_oracle(name: str) -> Oracle:
    """A built-in model, dequantised by transformers itself."""
    from transformers import AutoModelForCausalLM

    (path,) = resolve_model(name).weights
    return Oracle(AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32))


@pytest.fixture(scope="session")
def real_oracle() -> Callable[[str], Oracle]:
    cache: dict[str, Oracle] = {}

    def get(name: str) -> Oracle:
        if name not in cache:
            cache[name] = gguf_oracle(name)
        return cache[name]

    return get
