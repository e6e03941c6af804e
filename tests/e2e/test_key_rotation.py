"""Every worker gets another key, one after the other, while requests run: none fails, and no token changes."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.wire.curve import KeyPair, write_key_pair

from ..rig import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

NUM_CLIENTS = 6


def are_ready(url: str) -> bool:
    workers = httpx.get(f"{url}/load", trust_env=False, timeout=10).json()["workers"]
    return all(worker["state"] == "ready" for worker in workers)


def test_keys_change_while_requests_run(system_of: Any, random_prompts: Any, tmp_path: Path) -> None:
    old, new = KeyPair.generate(), KeyPair.generate()
    key, trusted = tmp_path / "key", tmp_path / "trusted"
    write_key_pair(str(key), old)
    trusted.write_text("")
    flags = ("--curve-key", str(key), "--curve-authorized", str(trusted))
    system = system_of(
        1,
        2,
        router_flags=("--local-prefill-threshold", "0", *flags),
        worker_flags=("--kv-transport", "tcp", "--drain-timeout-s", "60", *flags),
    )
    stack = system.stack
    prompts = random_prompts((200,) * NUM_CLIENTS, vocab_size=256, seed=6)
    expected = system.generate(prompts, max_tokens=150)
    answers: list[list[list[int]]] = []
    stopping = threading.Event()

    def ask() -> None:
        while not stopping.is_set():
            answers.append(system.generate(prompts, max_tokens=150))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        trusted.write_text(f"{old.public.decode()} before\n{new.public.decode()} after\n")
        write_key_pair(str(key), new, force=True)
        for worker in stack.workers():
            worker.terminate()
            worker.wait(time.monotonic() + 60)
            assert worker.returncode == 0 and not worker.forced
            stack.restart(worker)
            wait_until(lambda: are_ready(stack.url), "all workers are ready again", 60)
        trusted.write_text(f"{old.public.decode()} the router's, which was not restarted\n")
        num_before = len(answers)
        wait_until(lambda: len(answers) > num_before + 1, "requests run with the new keys", 60)
    finally:
        stopping.set()
        asking.join(120)
    assert answers and all(answer == expected for answer in answers)
