"""The audit log: one JSON object a line for each request that wants a key. Never a prompt, an answer or a key.

A thread of its own writes, so a slow disk delays no request: what its bounded queue has no room for is dropped and
counted. The file is opened again when it was moved away (logrotate) and on SIGHUP.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Mapping

import orjson

from common.errors import ConfigError
from common.observe import REMIND_S

log = logging.getLogger(__name__)

QUEUE_BOUND = 10_000
"""Entries that wait to be written; more are dropped and counted."""
BATCH = 512
"""Entries in one write."""
POLL_S = 0.2
"""How long an idle writer waits before it looks whether it is to end or to reopen the file."""
WRITABLE_S = 1.0
"""How long a full pipe may take to have room; then entries are dropped and counted."""
STDOUT = "-"
FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK

Entry = Mapping[str, object]


class AuditLog:
    """Appends to `path` ("-": standard output). It calls `on_drop` with the number of entries that were lost.

    Raises ConfigError for a file that it cannot open.
    """

    def __init__(self, path: str, on_drop: Callable[[int], None], *, bound: int = QUEUE_BOUND) -> None:
        self._path, self._on_drop = path, on_drop
        self._queue: queue.Queue[Entry] = queue.Queue(bound)
        self._closing, self._reopen = threading.Event(), threading.Event()
        self._torn = False  # the last write ended in the middle of a line
        self._complained_at = float("-inf")
        try:
            self._file = _open(path)
        except OSError as error:
            raise ConfigError("audit_log", path, f"a file that can be written ({error.strerror})") from error
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    def write(self, entry: Entry) -> None:
        """Never waits."""
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            self._on_drop(1)

    def reopen(self) -> None:
        """Open the file anew before the next line."""
        self._reopen.set()

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is queued, for at most `timeout_s`. May be called twice."""
        self._closing.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            closing = self._closing.is_set()  # before the look at the queue: what came first is written first
            entries = self._take()
            if entries:
                self._write(entries)
            elif closing:
                os.close(self._file)
                return

    def _take(self) -> list[Entry]:
        entries: list[Entry] = []
        try:
            entries.append(self._queue.get(timeout=POLL_S))
            while len(entries) < BATCH:
                entries.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        return entries

    def _write(self, entries: list[Entry]) -> None:
        if self._reopen.is_set() or self._moved():
            self._reopen.clear()
            try:
                fresh = _open(self._path)
            except OSError as error:  # the old file is better than none
                self._complain(error)
            else:
                os.close(self._file)
                self._file, self._torn = fresh, False
        data = b"".join([self._line(entry) for entry in entries])
        data = b"\n" + data if self._torn else data
        try:
            while data:
                data = data[self._write_some(data) :]
            self._torn = False
        except OSError as error:
            self._torn = True
            self._on_drop(data.count(b"\n") - data.startswith(b"\n"))
            self._complain(error)

    def _line(self, entry: Entry) -> bytes:
        try:
            return orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)
        except orjson.JSONEncodeError:  # text that is no Unicode must not end the log
            self._on_drop(1)
            return b""

    def _write_some(self, data: bytes) -> int:
        """Bytes written. Raises OSError for a pipe that its reader does not empty."""
        try:
            return os.write(self._file, data)
        except BlockingIOError:
            writable = select.poll()  # not `select`, which takes no descriptor beyond 1023
            writable.register(self._file, select.POLLOUT)
            if not writable.poll(WRITABLE_S * 1000):
                raise
            return 0

    def _moved(self) -> bool:
        if self._path == STDOUT:
            return False
        try:
            there, ours = os.stat(self._path), os.fstat(self._file)
        except OSError:
            return True
        return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)

    def _complain(self, error: OSError) -> None:
        now = time.monotonic()
        if now - self._complained_at >= REMIND_S:
            self._complained_at = now
            log.error("the audit log cannot be written", extra={"file": self._path, "why": error.strerror})


def _open(path: str) -> int:
    """`STDOUT` is duplicated: a container that is not root may not open /dev/stdout by name."""
    return os.dup(1) if path == STDOUT else os.open(path, FLAGS, 0o600)
