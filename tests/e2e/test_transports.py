"""KV by real NIXL, and from GPU to GPU over a pretended driver: workers that die, freeze or leave change no answer.

What a scenario asks of one of the two only is shown for the other in one process, by test_nixl.py and
test_cuda_ipc.py in tests/common/engine/transfer/transports and by tests/common/engine/kv/test_device_memory.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stack import Stack
from common.engine.transfer.transports.nixl import READ_S
from common.model_files.model_cache import locked

from .. import pretended_cuda
from ..rig import make_faulty
from .test_failures import run_with
from .test_handover import LONG, handovers, leave, under_load, wait_for_streams
from .test_same_answer import LENGTHS, NUM_TOKENS, Case

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

MANY_TOKENS = 400
SMALL_STEPS = ("--max-num-batched-tokens", "32")
TWO_RANKS = ("--tensor-parallel-size", "2")
LOGGED = {
    "nixl": {"decode": ": NIXL", "prefill": ": NIXL"},
    "cuda-ipc": {"decode": ": GPU to GPU", "prefill": ": GPU to GPU"},
}

# NIXL for tests: its packages in a folder of their own, without what they ask for (CUDA's libraries, torch).

VERSION = "1.5.1"
FOLDER = Path(__file__).resolve().parents[2] / "build" / f"nixl-{VERSION}"
INSTALL_S = 600.0


def nixl_env(tls: str = "") -> dict[str, str]:
    """The environment in which workers have NIXL. `tls`: the transports that UCX may use, "" for its own choice.

    Skips the test where the packages cannot be installed.
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


def with_gpus(stack: Stack) -> None:
    """Give workers pretended GPUs."""
    pretended_cuda.build()  # before workers need it at the same time
    for worker in stack.workers():
        make_faulty(worker, "--kv-transport", "cuda-ipc", cuda="pretended")


def with_gpus_for_prefill(stack: Stack) -> None:
    pretended_cuda.build()
    for worker in stack.workers("prefill"):
        make_faulty(worker, "--kv-transport", "cuda-ipc", cuda="pretended")


@pytest.fixture
def system_by(system_of: Any) -> Callable[..., Any]:
    """Start a system whose workers use a transport; every prompt goes through a prefill worker."""

    def start(transport: str, prefill: int = 1, decode: int = 1, *, tls: str = "tcp", **options: Any) -> Any:
        options["router_flags"] = ("--local-prefill-threshold", "0", *options.pop("router_flags", ()))
        if transport == "nixl":
            options["worker_flags"] = ("--kv-transport", "nixl", *options.pop("worker_flags", ()))
            options["env"] = nixl_env(tls)
        else:
            options.setdefault("prepare", with_gpus)
        return system_of(prefill, decode, **options)

    return start


def case_of(oracle: Any, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> Case:
    return Case(prompts, [oracle.greedy(prompt, num_tokens) for prompt in prompts])


@pytest.mark.parametrize("transport", LOGGED)
def test_answers_are_the_same(system_by: Any, tiny_oracle: Any, random_prompts: Any, transport: str) -> None:
    system = system_by(transport)
    case = case_of(tiny_oracle, random_prompts(LENGTHS, vocab_size=256, seed=1))
    case.check(system.generate(case.prompts, max_tokens=NUM_TOKENS, at_once=32))
    assert system.transfers(transport) >= len(case.prompts)
    assert not system.transfers("tcp") and not system.transfers("shm")
    case.check(system.generate(case.prompts, max_tokens=NUM_TOKENS, at_once=32))  # with hits in both caches
    logs = {worker.role: worker.log.read_text() for worker in system.stack.workers()}
    assert all(text in logs[role] for role, text in LOGGED[transport].items())


@pytest.mark.parametrize(("transport", "without"), [("nixl", "prefill"), ("cuda-ipc", "decode")])
def test_where_one_side_lacks_the_transport_blocks_come_as_frames(
    system_by: Any, tiny_oracle: Any, random_prompts: Any, transport: str, without: str
) -> None:
    lacking: dict[str, dict[str, Any]] = {
        "nixl": {f"{without}_flags": ("--kv-transport", "tcp")},
        "cuda-ipc": {"prepare": with_gpus_for_prefill},
    }
    system = system_by(transport, **lacking[transport])
    case = case_of(tiny_oracle, random_prompts((17, 200, 700), vocab_size=256, seed=8))
    case.check(system.generate(case.prompts, max_tokens=NUM_TOKENS))
    assert system.transfers("tcp") == len(case.prompts) and not system.transfers(transport)


@pytest.mark.parametrize("ranks", ["prefill", "decode"])
def test_a_worker_of_two_ranks(system_by: Any, tiny_oracle: Any, random_prompts: Any, ranks: str) -> None:
    """Its blocks pass through a ring."""
    system = system_by("nixl", **{f"{ranks}_flags": TWO_RANKS})
    case = case_of(tiny_oracle, random_prompts((1, 17, 200, 700, 1500), vocab_size=256, seed=3))
    case.check(system.generate(case.prompts, max_tokens=NUM_TOKENS))
    assert system.transfers("nixl") == len(case.prompts)
    if ranks == "prefill":
        assert "NIXL, through a ring of" in system.stack.workers("prefill")[0].log.read_text()


def test_a_small_cache_preempts(system_by: Any, tiny_oracle: Any, random_prompts: Any) -> None:
    few = ("--num-blocks", "48", "--kv-memory-gib", "0")
    system = system_by("nixl", worker_flags=("--block-size", "16"), decode_flags=few)
    case = case_of(tiny_oracle, random_prompts((60, 90, 130, 160) * 3, vocab_size=256, seed=2), 120)
    case.check(system.generate(case.prompts, max_tokens=120, at_once=12))
    assert system.metric("vllm:num_preemptions", "decode") and system.transfers("nixl")


@pytest.mark.parametrize(("transport", "role"), [("cuda-ipc", "prefill"), ("nixl", "decode")])
def test_a_killed_worker_costs_no_token(system_by: Any, random_prompts: Any, transport: str, role: str) -> None:
    system = system_by(transport, 2, 2, prefill_flags=SMALL_STEPS)
    prompts = random_prompts((30, 200, 700, 1500) * 2, vocab_size=256, seed=4)
    expected = system.generate(prompts, max_tokens=MANY_TOKENS)
    victim = system.stack.workers(role)[0]
    assert run_with(system, prompts, victim, victim.kill, cache_salt=role) == expected
    system.stack.restart(victim)
    system.stack.wait_ready(time.monotonic() + 60)
    before = system.transfers(transport)
    assert system.generate(prompts, max_tokens=MANY_TOKENS, cache_salt="again") == expected
    assert system.transfers(transport) > before


def test_a_frozen_prefill_worker_is_left_and_comes_back(system_by: Any, random_prompts: Any) -> None:
    """Reads of its memory are given up; what they still write when it wakes spoils no block."""
    system = system_by("nixl", 2, 2, prefill_flags=SMALL_STEPS)
    prompts = random_prompts((30, 700, 1500) * 2, vocab_size=256, seed=6)
    expected = system.generate(prompts, max_tokens=MANY_TOKENS)
    victim = system.stack.workers("prefill")[1]
    try:
        got = run_with(system, prompts, victim, victim.pause, cache_salt="frozen")
        time.sleep(READ_S)  # longer than its prompts need elsewhere
    finally:
        victim.resume()
    assert got == expected
    system.wait_for_workers()
    assert system.generate(prompts, max_tokens=MANY_TOKENS, cache_salt="awake") == expected


@pytest.mark.parametrize("transport", LOGGED)
def test_a_worker_that_leaves_hands_its_streams_over(system_by: Any, random_prompts: Any, transport: str) -> None:
    """To the other of two decode workers. NIXL uses here what UCX picks."""
    patient = ("--drain-timeout-s", "60")
    system = system_by(transport, 1, 2, tls="", router_flags=patient, worker_flags=patient)
    victim, other = system.stack.workers("decode")
    with under_load(system, random_prompts((30, 100, 200, 350), vocab_size=256, seed=7), LONG) as running:
        running.wait_for_streams(4)
        leave(victim)
    assert handovers(system) > 0
    system.stack.restart(victim)
    system.stack.wait_ready(time.monotonic() + 60)
    assert f"KV transfer from {victim.name}{LOGGED[transport]['decode']}" in other.log.read_text()
    wait_for_streams(system, 0)
