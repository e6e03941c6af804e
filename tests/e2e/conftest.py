"""Whole systems of real processes, shared by the tests that need the same one and checked for leaks after each test."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
import torch

from benchmarks.stack import Stack, StackProcess
from common.model_files.resolve import resolve_model
from common.model_files.tiny import make_tiny_model

from ..rig import ENGINE, READY_S, System, make_stack


def prompts_of(lengths: Sequence[int], *, vocab_size: int, seed: int) -> list[list[int]]:
    """Random prompts that share no prefix."""
    source = random.Random(seed)
    return [[source.randrange(vocab_size) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models, for services of several."""
    home = tmp_path_factory.mktemp("models")
    return {name: make_tiny_model(home / name, seed=seed) for seed, name in enumerate(("first", "second"), 11)}


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    """Closes what a test enters, as clients of SDKs: their connections would outlive it."""
    with ExitStack() as stack:
        yield stack


Systems = Callable[..., System]


def scope_of_systems(**_: object) -> Literal["session", "module"]:
    """Modules share workers that take a minute to start."""
    return "session" if ENGINE == "vllm" else "module"


class WorkerPool:
    """Running workers of vLLM, which stacks with the same settings of workers share. Each stack has its own routers."""

    MOST = 4

    def __init__(self) -> None:
        self._workers: dict[tuple[str, ...], StackProcess] = {}

    def start(self, stack: Stack) -> None:
        """Start a stack, with workers of the pool where it has them."""
        wanted: dict[tuple[str, ...], StackProcess] = {}
        for worker in stack.processes:
            at = worker.command.index("--address-file")
            key = (*worker.command[:at], *worker.command[at + 2 :])
            found = self._workers.pop(key, None)
            wanted[key] = found if found is not None and found.alive else worker
        while self._workers and len(self._workers) + len(wanted) > self.MOST:
            self._workers.pop(next(iter(self._workers))).kill()
        self._workers.update(wanted)
        stack.processes = list(wanted.values())
        new = [worker for worker in stack.processes if not worker.alive]
        with ThreadPoolExecutor() as starters:
            list(starters.map(lambda worker: stack.restart(worker, same_ports=False), new))
        for router in stack.routers:
            stack.restart(router)
        stack.wait_ready(time.monotonic() + READY_S)

    def stop(self) -> None:
        for worker in self._workers.values():
            worker.kill()


@pytest.fixture(scope=scope_of_systems)
def systems(tmp_path_factory: pytest.TempPathFactory, forge: None) -> Iterator[Systems]:
    """Start a system, or return the module's running one with the same shape; at most one runs at a time.

    `prepare`, a function of a module, changes the stack before it starts.
    """
    running: dict[str, System] = {}
    pool = WorkerPool()

    def stop_all() -> None:
        for system in running.values():
            for process in system.stack.routers if ENGINE == "vllm" else ():
                process.kill()
            if ENGINE == "diptych":
                system.stack.stop()
        running.clear()

    def start(
        prefill: int = 1,
        decode: int = 1,
        *,
        model: str = "tiny-random",
        prepare: Callable[[Stack], None] | None = None,
        **options: Any,
    ) -> System:
        key = repr((prefill, decode, model, prepare, sorted(options.items())))
        if key not in running:
            stop_all()
            stack = make_stack(tmp_path_factory.mktemp("stack"), prefill, decode, model=model, **options)
            if prepare is not None:
                prepare(stack)
            if ENGINE == "vllm":
                pool.start(stack)
            else:
                stack.start()
            running[key] = System(stack)
            running[key].wait_for_workers()
        return running[key]

    yield start
    stop_all()
    pool.stop()


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
