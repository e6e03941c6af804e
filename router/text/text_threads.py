"""The threads that tokenise for every model of a router: bounded, so that no prompt stalls the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from common.errors import RETRY_AFTER_S, Unavailable

Result = TypeVar("Result")

SHORT_TEXT = 8192
"""Texts of so many characters or tokens take a few milliseconds and never wait behind megabytes."""
TINY_TEXT = 1024
"""These take less time than a thread's turn costs: they have none."""
JOB_CHARS = 64
"""Cost of a tiny text in addition to its characters, in characters."""
HUGE_TEXT = 256 * 1024
"""Longer texts take up to seconds. They have a dedicated thread, so that no other text waits for them."""
MAX_PENDING = 1024
"""Jobs that wait or run."""


class TextThreads:
    """Threads for work on texts. With two or more, one is dedicated to short texts, and one more serves huge texts.

    At most `max_pending` jobs wait or run; one more raises Unavailable. One event loop owns it.
    """

    def __init__(self, threads: int, max_pending: int = MAX_PENDING) -> None:
        self._long = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="text-long")
        self._short = ThreadPoolExecutor(1, thread_name_prefix="text-short") if threads > 1 else self._long
        self._huge = ThreadPoolExecutor(1, thread_name_prefix="text-huge") if threads > 1 else self._long
        self._max_pending, self._pending, self._lock = max_pending, 0, threading.Lock()
        self._at_once = 0  # characters of tiny texts since the last yield to the event loop
        self._closed = False

    @property
    def num_pending(self) -> int:
        """How many jobs wait or run."""
        return self._pending

    async def run(self, job: Callable[[], Result], size: int) -> Result:
        """The result of a job on so many characters or tokens, at once or in a thread. Raises Unavailable."""
        if self._pending >= self._max_pending:
            raise Unavailable(
                f"{self._pending:,} texts wait to be tokenised, the bound is {self._max_pending:,}",
                retry_after_s=RETRY_AFTER_S,
            )
        if size <= TINY_TEXT and not self._closed:
            self._at_once += size + JOB_CHARS
            if self._at_once > SHORT_TEXT:  # one request may have thousands of tiny texts
                self._at_once = 0
                await asyncio.sleep(0)
            return job()
        try:
            pool = self._short if size <= SHORT_TEXT else self._long if size <= HUGE_TEXT else self._huge
            future = pool.submit(job)
        except RuntimeError as error:  # closed
            raise Unavailable("the router is shutting down", retry_after_s=RETRY_AFTER_S) from error
        with self._lock:
            self._pending += 1
        future.add_done_callback(self._done)  # runs in the job's thread, so an abandoned job counts until it ends
        try:
            return await asyncio.wrap_future(future)
        finally:
            del future  # its error refers to this frame, and a cycle keeps the text until garbage is collected

    def close(self) -> None:
        """Drop waiting jobs; the threads end after their current ones."""
        self._closed = True
        for pool in (self._short, self._long, self._huge):
            pool.shutdown(wait=False, cancel_futures=True)

    def _done(self, _: Future[Any]) -> None:
        with self._lock:
            self._pending -= 1
