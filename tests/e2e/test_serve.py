"""`diptych serve` as a newcomer runs it: it comes up, answers, and every process of it ends within five seconds."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.e2e

STOP_S = 5.0
START_S = 90.0


class Served:
    """One `diptych serve` in a process group of its own."""

    def __init__(self, log: Path, *flags: str) -> None:
        self.log = log
        command = [sys.executable, "-P", "-m", "diptych.router.serve", "--model", "tiny-random", "--port", "0", *flags]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.url = self._wait_for_url()

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            for line in self.log.read_text(errors="replace").splitlines():
                if "OpenAI base URL" in line:
                    return line.split()[-1].removesuffix("/v1")
            time.sleep(0.05)
        pytest.fail(f"not serving within {START_S:g} s\n{self.log.read_text(errors='replace')}")

    def members(self) -> set[int]:
        """It and every process below it that is alive."""
        parents = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended while the list was read
                    state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                    if state != "Z":
                        parents[int(entry.name)] = int(parent)
        found = {self.process.pid} & parents.keys()
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return found

    def end(self, number: int, *, whole_group: bool) -> float:
        """Seconds from the signal to the end of the last process."""
        members, began = self.members(), time.monotonic()
        (os.killpg if whole_group else os.kill)(self.process.pid, number)
        self.process.wait(2 * STOP_S)
        while any(is_alive(pid) for pid in members) and time.monotonic() < began + 2 * STOP_S:
            time.sleep(0.02)
        return time.monotonic() - began


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def served(tmp_path: Path) -> Iterator[list[Served]]:
    started: list[Served] = []
    yield started
    for one in started:
        if one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()


def ask(url: str) -> str:
    messages = [{"role": "user", "content": "x" * 200}]
    body = {"model": "tiny-random", "messages": messages, "max_tokens": 5, "temperature": 0}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


def test_two_services_side_by_side_end_by_control_c_and_by_sigterm(served: list[Served], tmp_path: Path) -> None:
    served += [Served(tmp_path / "a.log"), Served(tmp_path / "b.log", "--prefill", "0")]
    first, second = served
    assert first.url != second.url
    assert ask(first.url) == ask(second.url)  # two pools and one: the same answer
    assert len(first.members()) == 4  # serve, router, prefill, decode
    assert first.end(signal.SIGINT, whole_group=True) < STOP_S
    assert ask(second.url)
    assert second.end(signal.SIGTERM, whole_group=True) < STOP_S


def test_sigterm_to_the_parent_alone_ends_everything(served: list[Served], tmp_path: Path) -> None:
    served.append(Served(tmp_path / "c.log"))
    assert served[0].end(signal.SIGTERM, whole_group=False) < STOP_S
    assert served[0].process.returncode == 0


def test_killing_the_parent_ends_everything(served: list[Served], tmp_path: Path) -> None:
    served.append(Served(tmp_path / "d.log"))
    assert served[0].end(signal.SIGKILL, whole_group=False) < STOP_S
