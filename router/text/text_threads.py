"""Threads that tokenize for all models of a router. Their queue is bounded, and no prompt stalls the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from common.errors import RETRY_AFTER_S, Unavailable

Result = TypeVar("Result")

SHORT_TEXT = 8192
"""Texts up to this number of characters or tokens take a few milliseconds and never wait for longer ones."""
TINY_TEXT = 1024
"""Texts up to this size are processed on the event loop: that takes less time than switching to a thread."""
JOB_CHARS = 64
"""Fixed cost of a tiny text, in characters."""
HUGE_TEXT = 256 * 1024
"""Longer texts take up to seconds. They have a dedicated thread, so that no other text waits for them."""
MAX_PENDING = 1024
"""Maximum number of queued and running jobs."""


class TextThreads:
    """Thread pools for text processing. With two or more threads, one is dedicated to short texts, and an additional
    one processes huge texts.

    Not thread-safe: use from one event loop. Raises Unavailable above `max_pending` queued and running jobs.
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
        """Number of queued and running jobs."""
        return self._pending

    async def run(self, job: Callable[[], Result], size: int) -> Result:
        """Run a job on `size` characters or tokens, directly or in a thread. Raises Unavailable."""
        if self._pending >= self._max_pending:
            raise Unavailable(
                f"The tokenization queue is full: {self._pending:,} of {self._max_pending:,} texts.",
                retry_after_s=RETRY_AFTER_S,
            )
        if size <= TINY_TEXT and not self._closed:
            self._at_once += size + JOB_CHARS
            if self._at_once > SHORT_TEXT:  # a request may have thousands of tiny texts
                self._at_once = 0
                await asyncio.sleep(0)
            return job()
        try:
            pool = self._short if size <= SHORT_TEXT else self._long if size <= HUGE_TEXT else self._huge
            future = pool.submit(job)
        except RuntimeError as error:  # the pool is shut down
            raise Unavailable("The router is shutting down.", retry_after_s=RETRY_AFTER_S) from error
        with self._lock:
            self._pending += 1
        future.add_done_callback(self._done)  # called in the job's thread: an abandoned job counts until it ends
        try:
            return await asyncio.wrap_future(future)
        finally:
            del future  # its error refers to this frame; the cycle would keep the text until garbage collection

    def close(self) -> None:
        """Drop queued jobs. The threads end after their current jobs."""
        self._closed = True
        for pool in (self._short, self._long, self._huge):
            pool.shutdown(wait=False, cancel_futures=True)

    def _done(self, _: Future[Any]) -> None:
        with self._lock:
            self._pending -= 1
