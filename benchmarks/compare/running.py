"""An engine while it runs: its processes started, waited for, and ended with everything that they started."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import httpx

from benchmarks.compare.peer import Launch, PeerError, Process
from common.machine.child_process import ChildProcess

T = TypeVar("T")
POLL_INTERVAL_S = 0.1
STOP_TIMEOUT_S = 15.0
SAFE_PATH = {"PYTHONSAFEPATH": "1"}  # packages in the current folder must not shadow those of the environment


class RunningEngine:
    """Starts a launch's processes, each in a session of its own, and is ready when the `with` block begins.

    Logs go to `log_dir`, one file a process. `start_s` is how long the start took.
    """

    def __init__(self, launch: Launch, log_dir: Path, ready_timeout_s: float) -> None:
        self.launch, self.start_s = launch, 0.0
        self._log_dir, self._ready_timeout_s = log_dir, ready_timeout_s
        self._running: list[ChildProcess] = []

    def __enter__(self) -> Self:
        begin = time.monotonic()
        self._log_dir.mkdir(parents=True, exist_ok=True)
        try:
            for process in self.launch.processes:
                self._running.append(self._spawn(process))
            for process, child in zip(self.launch.processes, self._running, strict=True):
                self._wait_ready(process, child, begin + self._ready_timeout_s)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.monotonic() - begin
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns. Raises PeerError, and cancels it, as soon as one of the processes has ended."""
        working, watching = asyncio.create_task(work), asyncio.create_task(self._watch())
        try:
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            self._check()  # work that failed because a process died may be the first to end
            return await working
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    def memory_bytes(self) -> int:
        """Memory of all its processes; what several of them share is divided among them."""
        return sum(proportional_bytes(pid) for child in self._running for pid in family(child.pid))

    def stop(self) -> None:
        """Ask every process group to end, and force it after STOP_TIMEOUT_S."""
        for child in self._running:
            child.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for child in self._running:
            child.wait(deadline)
        self._running.clear()

    def _spawn(self, process: Process) -> ChildProcess:
        log = self._log_dir / f"{process.name}.log"
        log.unlink(missing_ok=True)
        child = ChildProcess(process.name, log, group=True)
        try:
            child.launch(process.argv, {**os.environ, **SAFE_PATH, **process.env})
        except OSError as error:
            raise PeerError(f"{process.name} cannot be started: {error}") from error
        return child

    def _wait_ready(self, process: Process, child: ChildProcess, deadline: float) -> None:
        while not _answers(process.ready):
            self._check()
            if time.monotonic() >= deadline:
                raise PeerError(f"{child.name} was not ready after {self._ready_timeout_s:g} s\n{child.log_tail()}")
            time.sleep(POLL_INTERVAL_S)

    async def _watch(self) -> NoReturn:
        while True:
            self._check()
            await asyncio.sleep(POLL_INTERVAL_S)

    def _check(self) -> None:
        """Raises PeerError when a process has ended."""
        for child in self._running:
            if not child.alive:
                raise PeerError(child.describe_end())


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0, trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:  # not listening yet, or too busy starting
        return False


def family(pid: int) -> list[int]:
    """A process and all that it started; without those that have ended."""
    try:
        tasks = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    return [pid, *(one for child in " ".join(tasks).split() for one in family(int(child)))]


def proportional_bytes(pid: int) -> int:
    """The proportional set size of a process; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
