"""KV that decode workers read with the real NIXL: workers that die, freeze, leave or lack NIXL change no answer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.engine.transfer.transports.nixl import READ_S
from common.model_files.cache_folder import locked

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


# NIXL for tests: its packages in a folder of their own, without what they ask for (CUDA's libraries, torch).

VERSION = "1.5.1"
FOLDER = Path(__file__).resolve().parents[2] / "build" / f"nixl-{VERSION}"
INSTALL_S = 600.0


def nixl_env(tls: str = "") -> dict[str, str]:
    """The environment in which workers have NIXL. `tls`: the transports that UCX may use, "": whichever it picks.

    Skips the test where the packages cannot be had.
    """
    done = FOLDER / ".done"
    with locked(FOLDER.parent / "nixl.lock"):
        if not done.exists():
            pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps")
            wheels = (f"nixl=={VERSION}", f"nixl-cu12=={VERSION}")
            ended = subprocess.run(
                (*pip, "--target", str(FOLDER), *wheels), capture_output=True, text=True, timeout=INSTALL_S, check=False
            )
            if ended.returncode != 0:
                pytest.skip(f"NIXL cannot be installed: {ended.stderr.strip()[-500:]}")
            done.touch()
    paths = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {"PYTHONPATH": os.pathsep.join(paths), **({"UCX_TLS": tls} if tls else {})}


ALL_REMOTE = ("--local-prefill-threshold", "0")
NIXL = ("--kv-transport", "nixl")
TWO_RANKS = ("--tensor-parallel-size", "2")


@pytest.mark.parametrize("tls", ["tcp", ""], ids=["tcp", "as UCX picks"])
def test_answers_are_the_same(system_of: Any, tiny_oracle: Any, random_prompts: Callable[..., Any], tls: str) -> None:
    system = system_of(router_flags=ALL_REMOTE, worker_flags=NIXL, env=nixl_env(tls))
    prompts = random_prompts(LENGTHS, vocab_size=256, seed=1)
    case = Case(prompts, [tiny_oracle.greedy(prompt, NUM_TOKENS) for prompt in prompts])
    case.check(system.generate(case.prompts, max_tokens=NUM_TOKENS, at_once=32))
    assert system.transfers("nixl") >= len(prompts) and not system.transfers("tcp") and not system.transfers("shm")
    case.check(system.generate(case.prompts, max_tokens=NUM_TOKENS, at_once=32))  # with hits in both caches
    logs = {worker.role: worker.log.read_text() for worker in system.stack.workers()}
    assert "is read with NIXL" in logs["decode"] and "by reads with NIXL" in logs["prefill"]


def test_a_small_cache_preempts(system_of: Any, tiny_oracle: Any, random_prompts: Callable[..., Any]) -> None:
    flags = {"worker_flags": (*NIXL, *SMALL_BLOCKS), "decode_flags": FEW_BLOCKS}
    system = system_of(router_flags=ALL_REMOTE, env=nixl_env("tcp"), **flags)
    prompts = random_prompts((60, 90, 130, 160) * 3, vocab_size=256, seed=2)
    a_small_cache_preempts(system, tiny_oracle, prompts, "nixl")


@pytest.mark.parametrize("ranks", ["prefill", "decode"])
def test_a_worker_of_two_ranks(
    system_of: Any, tiny_oracle: Any, random_prompts: Callable[..., Any], ranks: str
) -> None:
    """Its blocks pass through a ring."""
    system = system_of(router_flags=ALL_REMOTE, worker_flags=NIXL, env=nixl_env("tcp"), **{f"{ranks}_flags": TWO_RANKS})
    prompts = random_prompts((1, 17, 200, 700, 1500), vocab_size=256, seed=3)
    case = Case(prompts, [tiny_oracle.greedy(prompt, NUM_TOKENS) for prompt in prompts])
    case.check(system.generate(prompts, max_tokens=NUM_TOKENS))
    assert system.transfers("nixl") == len(prompts)
    if ranks == "prefill":
        assert "places that are read with NIXL" in system.stack.workers("prefill")[0].log.read_text()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_worker_costs_no_token(system_of: Any, random_prompts: Callable[..., Any], role: str) -> None:
    system = system_of(2, 2, router_flags=ALL_REMOTE, worker_flags=NIXL, prefill_flags=SMALL_STEPS, env=nixl_env("tcp"))
    prompts = random_prompts((30, 200, 700, 1500) * 2, vocab_size=256, seed=4)
    a_killed_worker_costs_no_token(system, prompts, role, "nixl")


def test_a_frozen_prefill_worker_is_left_and_comes_back(system_of: Any, random_prompts: Callable[..., Any]) -> None:
    """Reads of its memory are given up; what they still write when it wakes spoils no block."""
    system = system_of(2, 2, router_flags=ALL_REMOTE, worker_flags=NIXL, prefill_flags=SMALL_STEPS, env=nixl_env("tcp"))
    a_frozen_prefill_worker_is_left(system, random_prompts((30, 700, 1500) * 2, vocab_size=256, seed=6), READ_S)


def test_a_worker_that_leaves_hands_its_streams_over(system_of: Any, random_prompts: Callable[..., Any]) -> None:
    system = system_of(
        1, 2,
        router_flags=(*ALL_REMOTE, "--drain-timeout-s", "60"), worker_flags=(*NIXL, "--drain-timeout-s", "60"),
        env=nixl_env("tcp"),
    )  # fmt: skip
    prompts = random_prompts((30, 100, 200, 350), vocab_size=256, seed=7)
    a_leaving_worker_hands_over(system, prompts, "is read with NIXL")


@pytest.mark.parametrize("without", ["prefill", "decode"])
def test_where_one_side_has_no_nixl_blocks_come_as_frames(
    system_of: Any, tiny_oracle: Any, random_prompts: Callable[..., Any], without: str
) -> None:
    system = system_of(
        router_flags=ALL_REMOTE, worker_flags=NIXL, env=nixl_env("tcp"),
        **{f"{without}_flags": ("--kv-transport", "tcp")},
    )  # fmt: skip
    prompts = random_prompts((17, 200, 700), vocab_size=256, seed=8)
    case = Case(prompts, [tiny_oracle.greedy(prompt, NUM_TOKENS) for prompt in prompts])
    case.check(system.generate(prompts, max_tokens=NUM_TOKENS))
    assert system.transfers("tcp") == len(prompts) and not system.transfers("nixl")
