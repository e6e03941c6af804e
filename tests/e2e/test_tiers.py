"""Prefixes that outlive memory, in real processes: a worker that died answers from its file, which is its own."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stack import Place, Stack, StackProcess, StackSettings
from common.machine.child_process import ChildProcess

from ..rig import System, samples, wait_until
from .test_failures import ALL_REMOTE

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
LENGTHS, NUM_CACHED = (200, 90, 17), (192, 80, 16)


def test_a_killed_worker_answers_its_first_hits_from_disk(system_of: Any, random_prompts: Any, tmp_path: Path) -> None:
    file = tmp_path / "blocks"
    disk = ("--kv-disk-path", str(file), "--kv-disk-gib", "0.05")
    system = system_of(router_flags=ALL_REMOTE, prefill_flags=disk)
    prompts = random_prompts(LENGTHS, vocab_size=256, seed=41)
    expected = system.generate(prompts, max_tokens=8)
    (worker,) = system.stack.workers("prefill")
    wait_until(lambda: used(worker) == sum(NUM_CACHED) / 16, "every full block is in the file")
    worker.kill()
    system.stack.restart(worker)
    system.wait_for_workers()
    wait_until(lambda: used(worker) == sum(NUM_CACHED) / 16, "every full block was found again")
    assert system.generate(prompts, max_tokens=8) == expected
    assert hits(worker, "disk") == sum(NUM_CACHED) and hits(worker, "memory") == 0
    cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in system.bodies[-3:]]
    assert sorted(cached) == sorted(NUM_CACHED)
    assert "a file that no other worker uses" in refusal_of(worker, tmp_path)
    system.settle()
    worker.send_signal(signal.SIGTERM)
    wait_until(lambda: not worker.alive, "the worker ends")
    system.stack.restart(worker)
    system.wait_for_workers()  # the file was left whole


def used(worker: StackProcess) -> float:
    return sum(samples(worker, "diptych_kv_tier_blocks", 'state="used"'))


def hits(worker: StackProcess, tier: str) -> float:
    return sum(samples(worker, "diptych_prefix_hit_tokens", f'tier="{tier}"'))


def refusal_of(worker: StackProcess, folder: Path) -> str:
    """What a second worker with the same settings says before it ends."""
    second = ChildProcess("second", folder / "second.log")
    second.launch([*worker.command, "--address-file", str(folder / "second.json")])
    wait_until(lambda: not second.alive, "the second worker ends")
    return second.log_tail()


def test_a_full_disk_costs_the_tier_and_no_answer(random_prompts: Any, tmp_path: Path) -> None:
    """The first worker may write files of 200 kB: its first blocks fit. The second one cannot even begin one."""
    flags = ("--kv-disk-path", str(tmp_path / "blocks"), "--kv-disk-gib", "0.05", "--kv-transport", "tcp")
    prompts = random_prompts((300, 90), vocab_size=256, seed=42)
    for most_bytes in (200_000, 4000):
        place = Place(prefix=("prlimit", f"--fsize={most_bytes}"))
        with Stack(
            StackSettings(
                model="tiny-random", prefill_flags=flags, router_flags=ALL_REMOTE, places={"prefill-0": place}
            )
        ) as stack:
            system = System(stack)
            system.wait_for_workers()
            (worker,) = stack.workers("prefill")
            answers = system.generate(prompts, max_tokens=4)
            wait_until(lambda worker=worker: samples(worker, "diptych_kv_tier_up") == [0.0], "the tier is off")
            assert system.generate(prompts, max_tokens=4) == answers
            assert "disk tier: disabled until the worker restarts" in worker.log_tail()
            system.settle()
        (tmp_path / "blocks").unlink()
