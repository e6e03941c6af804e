"""vLLM's ranks on two hosts, of which the second is a process group of its own: the answers of one rank, and deaths."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.wire.curve import KeyPair, write_key_pair

from ....waiting import until
from .engines import write_llama
from .rank_hosts import RankHostProcess, free_port
from .test_with_vllm import PROMPT, Worker, greedy

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[RankHostProcess]:
    write_key_pair(str(tmp_path / "key.toml"), KeyPair.generate())
    host = RankHostProcess(tmp_path, free_port(), "--curve-key", str(tmp_path / "key.toml"))
    host.start()
    yield host
    host.end()


async def test_two_hosts_answer_as_one_and_a_lost_rank_is_reported(
    host: RankHostProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    for name in ("VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    folder = write_llama(tmp_path / "llama")
    port = int(host.leader.rpartition(":")[2])
    common: dict[str, Any] = {"curve_key": str(tmp_path / "key.toml"), "kv_memory_gib": 1.0}
    worker = Worker(folder, tensor_parallel_size=2, rank_hosts=2, rank_port=port, kv_port=free_port(), **common)
    # Another host's processes are not descendants of the worker, which ends its own.
    worker.model._processes -= {host.pid, *(each.pid for each in psutil.Process(host.pid).children(recursive=True))}
    prefill = None
    try:
        assert await worker.ask(PROMPT) == greedy(folder, PROMPT)
        prefill = Worker(folder, "prefill", **common)
        other = [*PROMPT[::-1], 7]
        assert await worker.ask(other, prefill=prefill) == greedy(folder, other)
        assert worker.model.failure == "" and worker.num_received_bytes > 0
        (follower,) = host.children()
        started = psutil.Process(follower).children()
        (rank,) = [each for each in started if "resource_tracker" not in " ".join(each.cmdline())]
        rank.kill()
        await until(lambda: bool(worker.model.failure), patience_s=20.0)
        assert worker.model.failure == "host 1 at 127.0.0.1: a rank has ended (exit status -9)"
    finally:
        worker.close()
        if prefill is not None:
            prefill.close()
    host.wait_for("waits for the next worker")
    assert not psutil.pid_exists(follower)
    os.kill(host.pid, signal.SIGTERM)
    host.wait(time.monotonic() + 20.0)
    assert (host.returncode, host.forced) == (0, False), host.log_tail()
