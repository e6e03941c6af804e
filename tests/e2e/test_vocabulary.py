"""A worker is ready once it has its vocabulary: a large one holds every thread up for a second while it is built."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from ..rig import MODEL, PATIENCE_S, PROBE_TIMEOUT_S, READY_S, Program, command_with_faults, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_worker_is_ready_once_it_has_its_vocabulary(tmp_path: Path, launch: Callable[..., Program]) -> None:
    known, built = tmp_path / "address.json", tmp_path / "built"
    flags = ("--model", MODEL, "--kv-memory-gib", "0.1", "--threads", "1", "--port", "0", "--http-port", "0")
    worker = launch(*command_with_faults("prefill", *flags, "--address-file", str(known), slow_vocabulary=built))
    wait_until(known.exists, "it listens", READY_S)
    with httpx.Client(
        base_url=json.loads(known.read_text())["http"], timeout=PROBE_TIMEOUT_S, trust_env=False
    ) as client:
        # The tiny model is loaded within this time, and only its vocabulary is missing.
        until = time.monotonic() + 10.0
        while time.monotonic() < until:
            assert client.get("/ready").status_code == 503 and client.get("/health").status_code == 200
            time.sleep(0.1)
        built.touch()
        wait_until(lambda: client.get("/ready").status_code == 200, "it is ready", READY_S)
    worker.stop(PATIENCE_S)
    assert worker.returncode == 0, worker.describe_end()
