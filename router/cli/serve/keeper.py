"""Base of the supervisors: restart child processes that exit or hang, with backoff."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable
from typing import Any

from common.errors import DiptychError
from router.cli.serve.child import Child
from router.cli.serve.liveness import watch

log = logging.getLogger(__name__)

POLL_S = 0.05
"""Poll interval for processes that are starting."""
ECHO_S = 0.5
"""A second signal within this time is a duplicate: `make` forwards signals that its process group received too."""
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
"""Restart delay, which doubles each time."""
REFUSED = 2
"""Exit status of a process that refuses its settings or model."""
HEALTHY_AFTER_S = 60.0
"""Uptime after which the restart delay is reset."""


class StartFailed(DiptychError):
    """A process exited or hung before the service was ready. `status` is that of the service: 2 for a refusal."""

    def __init__(self, reason: str, status: int = 1) -> None:
        super().__init__(reason)
        self.status = status


def describe_exit(status: int) -> str:
    """Return an exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    return f"killed by signal {-status} ({signal.strsignal(-status)})"


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the running tasks and wait for them. Results of completed tasks are left to the caller."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Keeper(ABC):
    """Owner of child processes. `run` returns after `stop` was called and every child has exited.

    `period_s` is the interval of health checks, 0 for none. `start_s` is the maximum start time, 0 for no limit.
    `grace_s` is the time from SIGTERM to SIGKILL.
    """

    def __init__(self, *, period_s: float, start_s: float, grace_s: float) -> None:
        self.stopping = asyncio.Event()
        self._period_s, self._start_s, self._grace_s = period_s, start_s or math.inf, grace_s
        self._tasks: dict[Child | None, list[asyncio.Task[None]]] = {}
        self._broken: asyncio.Future[None] | None = None
        self._stopped_at = 0.0

    @property
    @abstractmethod
    def children(self) -> tuple[Child, ...]:
        """The current children."""

    @abstractmethod
    def rounds_of(self, child: Child) -> int:
        """Return the number of consecutive failed health checks that stop a child."""

    def begin(self) -> None:  # noqa: B027 - optional
        """Start further tasks of `run` with `own`."""

    def stop(self) -> None:
        """Stop all children. A second call kills those that still run, unless it is a duplicate of the first."""
        now = time.monotonic()
        if not self.stopping.is_set():
            self._stopped_at = now
        elif now - self._stopped_at >= ECHO_S:
            self._signal_all(signal.SIGKILL)
        self.stopping.set()

    async def run(self) -> None:
        """Restart children that exit or hang until `stop` is called, then stop all of them."""
        stopped = asyncio.create_task(self.stopping.wait())
        self._broken = asyncio.get_running_loop().create_future()
        for child in self.children:
            self.guard(child)
        self.begin()
        await asyncio.wait((stopped, self._broken), return_when=asyncio.FIRST_COMPLETED)
        await cancel((stopped, *(task for tasks in self._tasks.values() for task in tasks)))
        await self.shutdown()
        if self._broken.done():
            self._broken.result()
        self._broken.cancel()

    async def shutdown(self) -> None:
        """Send SIGTERM to all children, and SIGKILL to the remaining ones after the grace period."""
        self.stopping.set()
        running = [child for child in self.children if child.alive]
        self._signal_all(signal.SIGTERM)
        ended = asyncio.gather(*(child.ended() for child in running))
        try:
            await asyncio.wait_for(asyncio.shield(ended), self._grace_s)
        except TimeoutError:
            for child in running:
                if child.alive:
                    reason = f"did not exit within {self._grace_s:g} s of SIGTERM"
                    log.warning("supervisor: killed %s (pid %d): %s", child.name, child.pid, reason)
            self._signal_all(signal.SIGKILL)
            await ended

    async def unless_stopped(self, work: Coroutine[Any, Any, None], watched: Iterable[Child]) -> None:
        """Await `work`. Raises StartFailed if a watched child exits, and returns if `stop` is called."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self.stopping.wait())
        exits = {asyncio.create_task(child.ended()): child for child in watched}
        try:
            await asyncio.wait({task, stopped, *exits}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            elif not stopped.done():
                ended, child = next((exit, child) for exit, child in exits.items() if exit.done())
                status = ended.result()
                why = f"{child.name} exited during startup ({describe_exit(status)})"
                raise StartFailed(why, status if status == REFUSED else 1)
        finally:
            await cancel((task, stopped, *exits))

    def guard(self, child: Child) -> None:
        """Restart `child` when it exits, and stop it when it hangs."""
        self.own(child, self._keep(child), f"keep {child.name}")
        if self._period_s:
            watching = watch(child, self.rounds_of(child), self._period_s, self._grace_s, self._start_s)
            self.own(child, watching, f"watch {child.name}")

    def release(self, child: Child) -> list[asyncio.Task[None]]:
        """Return the tasks of `guard` for the caller to cancel."""
        return self._tasks.pop(child, [])

    def own(self, child: Child | None, work: Coroutine[None, None, None], name: str) -> None:
        """Run `work` as a task. If it fails, `run` stops with its error."""
        task = asyncio.create_task(work, name=name)
        owned = self._tasks.setdefault(child, [])
        owned.append(task)
        task.add_done_callback(lambda done: self._on_done(done, owned))

    def _on_done(self, task: asyncio.Task[None], owned: list[asyncio.Task[None]]) -> None:
        owned.remove(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)

    def _signal_all(self, signum: signal.Signals) -> None:
        for child in self.children:
            child.send_signal(signum)

    async def _keep(self, child: Child) -> None:
        """Restart `child` each time it exits, with a growing delay.

        A failed start, for example for lack of memory, is retried. It does not affect the other children.
        """
        backoff = FIRST_BACKOFF_S
        while True:
            status = await child.ended()
            lived_s = time.monotonic() - child.started_at
            backoff = FIRST_BACKOFF_S if lived_s >= HEALTHY_AFTER_S else backoff
            log.error(
                "supervisor: %s exited, restarting it",
                child.name,
                extra={"child": child.name, "why": describe_exit(status), "lived_s": lived_s, "wait_s": backoff},
            )
            while True:
                child.rest(backoff)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, LONGEST_BACKOFF_S)
                try:
                    child.start()
                    break
                except OSError as error:
                    why = {"child": child.name, "why": error.strerror, "wait_s": backoff}
                    log.error("supervisor: cannot start %s, will retry", child.name, extra=why)
