"""Keeps child processes running: restarts with backoff those that end or hang, and ends all of them in the end."""

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
"""Between two looks at processes that start."""
ECHO_S = 0.5
"""A signal this soon after the first repeats it: `make` passes on to its children a signal that its whole group got."""
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
"""Before a process is started again: twice as long each time."""
HEALTHY_AFTER_S = 60.0
"""A process that lived this long is restarted after the first backoff again."""


class StartFailed(DiptychError):
    """A process ended or hung before the service was ready, and would do so again after a restart."""


def describe_exit(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    return f"killed by signal {-status} ({signal.strsignal(-status)})"


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks that still run and wait for them; the caller reads the results of those that finished."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Keeper(ABC):
    """Owns child processes. `run` returns after `stop` was called and every child has ended.

    `period_s`: between two probes of a child, 0 for none; a child may take `start_s` to start, 0: any time, and
    `grace_s` from SIGTERM to SIGKILL.
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
        """All that are owned now."""

    @abstractmethod
    def rounds_of(self, child: Child) -> int:
        """Bad probes in a row that end a child."""

    def begin(self) -> None:  # noqa: B027 - not every keeper has more
        """More work of `run`, by `own`."""

    def stop(self) -> None:
        """End all; a second call, unless it echoes the first, kills what still runs."""
        now = time.monotonic()
        if not self.stopping.is_set():
            self._stopped_at = now
        elif now - self._stopped_at >= ECHO_S:
            self._signal_all(signal.SIGKILL)
        self.stopping.set()

    async def run(self) -> None:
        """Restart processes that end or hang until `stop` is called, then end them all."""
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
        """SIGTERM to all processes, SIGKILL after the grace to those that are left."""
        self.stopping.set()
        running = [child for child in self.children if child.alive]
        self._signal_all(signal.SIGTERM)
        ended = asyncio.gather(*(child.ended() for child in running))
        try:
            await asyncio.wait_for(asyncio.shield(ended), self._grace_s)
        except TimeoutError:
            late = ", ".join(child.name for child in running if child.alive)
            log.warning("killed what did not end by itself", extra={"children": late, "waited_s": self._grace_s})
            self._signal_all(signal.SIGKILL)
            await ended

    async def unless_stopped(self, work: Coroutine[Any, Any, None], watched: Iterable[Child]) -> None:
        """Await `work`, but raise StartFailed when one of these ends, and return when `stop` is called."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self.stopping.wait())
        exits = {asyncio.create_task(child.ended()): child for child in watched}
        try:
            await asyncio.wait({task, stopped, *exits}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            elif not stopped.done():
                ended, child = next((exit, child) for exit, child in exits.items() if exit.done())
                raise StartFailed(f"{child.name} ended while starting ({describe_exit(ended.result())})")
        finally:
            await cancel((task, stopped, *exits))

    def guard(self, child: Child) -> None:
        """Restart `child` when it ends, and end it when it hangs."""
        self.own(child, self._keep(child), f"keep {child.name}")
        if self._period_s:
            watching = watch(child, self.rounds_of(child), self._period_s, self._grace_s, self._start_s)
            self.own(child, watching, f"watch {child.name}")

    def release(self, child: Child) -> list[asyncio.Task[None]]:
        """The tasks of `guard`, which the caller ends."""
        return self._tasks.pop(child, [])

    def own(self, child: Child | None, work: Coroutine[None, None, None], name: str) -> None:
        """Run `work`; if it fails the service ends with its error."""
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
        """Restart `child` each time it ends, with a growing delay unless it had lived for a while.

        A restart that the machine refuses, for lack of memory for example, is tried again; the other children serve on.
        """
        backoff = FIRST_BACKOFF_S
        while True:
            status = await child.ended()
            lived_s = time.monotonic() - child.started_at
            backoff = FIRST_BACKOFF_S if lived_s >= HEALTHY_AFTER_S else backoff
            log.error(
                "a process ended, restarting it",
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
                    log.error("a process cannot be started, trying again", extra=why)
