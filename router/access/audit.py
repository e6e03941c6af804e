"""Audit log: one JSON object per line for each request that needs a key. Never contains a prompt, an answer or a key.

A separate thread writes, so a slow disk delays no request. Entries that do not fit into its bounded queue are dropped
and counted. The file is reopened after it was renamed (logrotate) and on SIGHUP.
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
from common.machine import write_failure
from common.observe import REMIND_S

log = logging.getLogger(__name__)

QUEUE_BOUND = 10_000
"""Maximum number of queued entries. Further entries are dropped and counted."""
BATCH = 512
"""Maximum number of entries per write."""
POLL_S = 0.2
"""Interval, in seconds, at which an idle writer checks whether to exit or to reopen the file."""
WRITABLE_S = 1.0
"""Maximum time, in seconds, to wait for a full pipe. Afterwards entries are dropped and counted."""
STDOUT = "-"
FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK

Entry = Mapping[str, object]


class AuditLog:
    """Appends entries to `path` ("-": standard output). Calls `on_drop` with the number of lost entries.

    Raises ConfigError if the file cannot be opened.
    """

    def __init__(self, path: str, on_drop: Callable[[int], None], *, bound: int = QUEUE_BOUND) -> None:
        self._path, self._on_drop = path, on_drop
        self._queue: queue.Queue[Entry] = queue.Queue(bound)
        self._closing, self._reopen = threading.Event(), threading.Event()
        self._torn = False  # whether the last write ended in the middle of a line
        self._complained_at = float("-inf")
        self._file = open_log(path)
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    def write(self, entry: Entry) -> None:
        """Queue an entry, without blocking."""
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            self._on_drop(1)

    def reopen(self) -> None:
        """Reopen the file before the next line."""
        self._reopen.set()

    def close(self, timeout_s: float = 2.0) -> None:
        """Write the queued entries, for at most `timeout_s`. May be called twice."""
        self._closing.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            closing = self._closing.is_set()  # read before the queue, so that all earlier entries are written
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
            except OSError as error:  # keep writing to the old file
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
        except orjson.JSONEncodeError:  # invalid Unicode must not stop the log
            self._on_drop(1)
            return b""

    def _write_some(self, data: bytes) -> int:
        """Return the number of bytes written. Raises OSError if a pipe stays full."""
        try:
            return os.write(self._file, data)
        except BlockingIOError:
            writable = select.poll()  # `select` does not support descriptors above 1023
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
            log.error("audit log: %s; lines are dropped, requests are still served", write_failure(self._path, error))


def open_log(path: str) -> int:
    """Open the log at the start of the router. Returns the descriptor. Raises ConfigError."""
    try:
        return _open(path)
    except OSError as error:
        raise ConfigError("audit_log", path, f"a writable file ({error.strerror})") from error


def _open(path: str) -> int:
    """Open the log. Duplicates STDOUT, because a container without root may not open /dev/stdout by name."""
    return os.dup(1) if path == STDOUT else os.open(path, FLAGS, 0o600)
