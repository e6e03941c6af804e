"""The key file of a router of two processes changes while it runs, and while one of them is started again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.stack import Stack
from router.access.keys import digest_of

from ..rig import wait_until
from .test_router_processes import bearer, page, pids, told

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM, MANY = 2, 12
OLD, NEW = "dpk_" + "o" * 40, "dpk_" + "n" * 40
LOOK_S = 0.5
"""Between two looks of a process at its files."""
SLACK_S = 1.5
"""For a busy machine: looks, and the requests that watch them, come late."""


def keys(*secrets: str) -> str:
    tables = (f'[[key]]\nname = "{one[-1]}"\nsha256 = "{digest_of(one.encode()).hex()}"\n' for one in secrets)
    return "".join(tables)


@pytest.fixture
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.getbasetemp() / "keys-of-two-processes.toml"
    path.write_text(keys(OLD))
    return path


@pytest.fixture
def stack(system_of: Any, file: Path) -> Iterator[Stack]:
    flags = ("--router-processes", str(NUM), "--api-key-file", str(file))
    found: Stack = system_of(router_flags=flags).stack
    wait_until(lambda: told(page(found), "diptych_router_processes") == NUM, "both processes serve")
    wait_until(lambda: answers(found, OLD) == {200}, "both go by the file")
    yield found


def answers(stack: Stack, secret: str) -> set[int]:
    """What connections of their own are told, which the kernel deals out to both."""
    urls = [f"{stack.url}/v1/models"] * MANY
    return {httpx.get(url, headers=bearer(secret), trust_env=False, timeout=30).status_code for url in urls}


def refused(stack: Stack) -> float:
    return told(page(stack), "diptych_reloads_total", 'result="refused"')


def kill(stack: Stack, victim: int) -> None:
    """And wait for the process that takes its place."""
    killed = pids(stack.router)[victim]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: pids(stack.router).get(victim, killed) != killed, "it is started again")
    wait_until(lambda: told(page(stack), "diptych_router_processes") == NUM, "both processes serve")


def test_both_processes_change_their_keys_together(stack: Stack, file: Path) -> None:
    assert answers(stack, OLD) == {200} and answers(stack, NEW) == {401}
    changed = time.monotonic()
    file.write_text(keys(NEW))
    while (first := answers(stack, NEW)) == {401}:
        assert time.monotonic() - changed < 2 + SLACK_S
    differed_at = time.monotonic()
    while first != {200} or answers(stack, OLD) != {401}:
        assert time.monotonic() - differed_at < LOOK_S + SLACK_S
        first = answers(stack, NEW)


def test_a_process_that_is_started_again_goes_by_the_keys_of_the_other(stack: Stack, file: Path) -> None:
    """It is killed after the file has changed into one that both refuse: alone it would refuse to start."""
    before = refused(stack)
    file.write_text(keys(NEW) + 'colour = "red"\n')
    wait_until(lambda: refused(stack) >= before + NUM, "both refuse it")
    for victim in range(NUM):
        kill(stack, victim)
        assert answers(stack, OLD) == {200} and answers(stack, NEW) == {401}
    file.write_text(keys(OLD, NEW))
    wait_until(lambda: answers(stack, NEW) == {200}, "both take the next file")
    assert answers(stack, OLD) == {200}
