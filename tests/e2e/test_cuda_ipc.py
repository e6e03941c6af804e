"""KV that goes from GPU to GPU over a pretended driver: real workers, whose deaths and moves change no answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .. import pretended_cuda
from ..rig import make_faulty
from .test_same_answer import LENGTHS, NUM_TOKENS, Case
from .transports import (
    FEW_BLOCKS,
    SMALL_BLOCKS,
    SMALL_STEPS,
    a_frozen_prefill_worker_is_left,
    a_killed_worker_costs_no_token,
    a_leaving_worker_hands_over,
    a_small_cache_preempts,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

ALL_REMOTE = ("--local-prefill-threshold", "0")


@pytest.fixture
def gpus_of(system_of: Any) -> Iterator[Callable[..., Any]]:
    """A system whose workers have pretended GPUs, but for those of the role `without`."""
    pretended_cuda.build()  # before workers need it at the same time

    def start(prefill: int = 1, decode: int = 1, *, without: str = "", **options: Any) -> Any:
        system = system_of(prefill, decode, router_flags=(*ALL_REMOTE, *options.pop("router_flags", ())), **options)
        for worker in system.stack.workers():
            if worker.role != without and "cuda-ipc" not in worker.command:
                worker.kill()
                make_faulty(worker, "--kv-transport", "cuda-ipc", cuda="pretended")
                system.stack.restart(worker)
        system.wait_for_workers()
        return system

    yield start


def test_answers_are_the_same(gpus_of: Any, tiny_oracle: Any, random_prompts: Callable[..., Any]) -> None:
    system = gpus_of()
    prompts = random_prompts(LENGTHS, vocab_size=256, seed=1)
    case = Case(prompts, [tiny_oracle.greedy(prompt, NUM_TOKENS) for prompt in prompts])
    case.check(system.generate(case.prompts, max_tokens=NUM_TOKENS, at_once=32))
    assert system.transfers("cuda-ipc") >= len(prompts) and not system.transfers("tcp") and not system.transfers("shm")
    case.check(system.generate(case.prompts, max_tokens=NUM_TOKENS, at_once=32))  # with hits in both caches
    logs = {worker.role: worker.log.read_text() for worker in system.stack.workers()}
    assert "is copied from GPU to GPU" in logs["decode"] and "goes from GPU to GPU" in logs["prefill"]


def test_a_small_cache_preempts(gpus_of: Any, tiny_oracle: Any, random_prompts: Callable[..., Any]) -> None:
    system = gpus_of(worker_flags=SMALL_BLOCKS, decode_flags=FEW_BLOCKS)
    prompts = random_prompts((60, 90, 130, 160) * 3, vocab_size=256, seed=2)
    a_small_cache_preempts(system, tiny_oracle, prompts, "cuda-ipc")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_worker_costs_no_token(gpus_of: Any, random_prompts: Callable[..., Any], role: str) -> None:
    prompts = random_prompts((30, 200, 700, 1500) * 2, vocab_size=256, seed=4)
    a_killed_worker_costs_no_token(gpus_of(2, 2, prefill_flags=SMALL_STEPS), prompts, role, "cuda-ipc")


def test_a_frozen_prefill_worker_is_left_and_comes_back(gpus_of: Any, random_prompts: Callable[..., Any]) -> None:
    prompts = random_prompts((30, 700, 1500) * 2, vocab_size=256, seed=6)
    a_frozen_prefill_worker_is_left(gpus_of(2, 2, prefill_flags=SMALL_STEPS), prompts)


def test_a_worker_that_leaves_hands_its_streams_over(gpus_of: Any, random_prompts: Callable[..., Any]) -> None:
    system = gpus_of(1, 2, router_flags=("--drain-timeout-s", "60"), worker_flags=("--drain-timeout-s", "60"))
    prompts = random_prompts((30, 100, 200, 350), vocab_size=256, seed=7)
    a_leaving_worker_hands_over(system, prompts, "is copied from GPU to GPU")


@pytest.mark.parametrize("without", ["prefill", "decode"])
def test_where_one_side_has_no_such_gpu_blocks_come_otherwise(
    gpus_of: Any, tiny_oracle: Any, random_prompts: Callable[..., Any], without: str
) -> None:
    system = gpus_of(without=without, env={"WITHOUT": without})  # a system of its own
    prompts = random_prompts((17, 200, 700), vocab_size=256, seed=8)
    case = Case(prompts, [tiny_oracle.greedy(prompt, NUM_TOKENS) for prompt in prompts])
    case.check(system.generate(prompts, max_tokens=NUM_TOKENS))
    assert system.transfers("tcp") == len(prompts) and not system.transfers("cuda-ipc")
