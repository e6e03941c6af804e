import asyncio
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from common.machine.child_process import ChildProcess

PARENT = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""
TYING = """
import sys, time
from common.machine.child_process import ChildProcess
child = ChildProcess("some", tied=True)
child.launch([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_process_that_was_never_launched_is_at_rest() -> None:
    child = ChildProcess("some")
    child.stop()
    assert (child.alive, child.returncode, child.log_tail()) == (False, None, "")


def test_the_end_of_a_process_is_described_with_its_log(tmp_path: Path) -> None:
    child = ChildProcess("some", tmp_path / "log")
    child.launch([sys.executable, "-c", "print('first', flush=True); raise SystemExit('last')"])
    child.wait(time.monotonic() + 60)
    assert not child.forced
    assert child.describe_end().splitlines() == ["some exited with status 1", "first", "last"]


def test_a_group_ends_with_all_that_it_started(tmp_path: Path) -> None:
    child = ChildProcess("some", tmp_path / "log", group=True)
    child.launch([sys.executable, "-c", PARENT])
    while not child.log_tail():
        time.sleep(0.01)
    grandchild = psutil.Process(int(child.log_tail()))
    child.stop(60)
    assert child.returncode == -signal.SIGTERM
    wait_for_end(grandchild)


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_a_tied_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    parent = ChildProcess("some", tmp_path / "log")
    parent.launch([sys.executable, "-c", TYING])
    while not parent.log_tail():
        assert parent.alive
        time.sleep(0.01)
    tied = psutil.Process(int(parent.log_tail()))
    parent.kill()
    wait_for_end(tied)


def wait_for_end(process: psutil.Process) -> None:
    deadline = time.monotonic() + 60
    while not has_ended(process):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_a_process_is_awaited_beside_other_tasks() -> None:
    child = ChildProcess("some")
    child.launch([sys.executable, "-c", "import time; time.sleep(600)"])
    waiting = asyncio.create_task(child.ended())
    await asyncio.sleep(0)
    child.send_signal(signal.SIGKILL)
    assert await waiting == -signal.SIGKILL
