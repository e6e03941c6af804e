"""The metrics of all processes of a router, told by any of them, without a counter ever going back.

    asked ─> each process writes its text to its file, and tells it ─> the one that is asked adds them up
    dead  ─> its file stays, and counts until its successor has put the counters of it among those that ended

A decreasing series would look like a restart of the whole router to Prometheus, whose rates would jump. On a full disk
the text of a running process is still returned, but counts since its last stored text are lost when it dies.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from common.observe import REMIND_S
from router.siblings.exposition import counters, merged
from router.siblings.part import RouterPart

log = logging.getLogger(__name__)
NEW = ".new"
"""Suffix of a file that is being written."""
NUM_TOLD = (
    "# HELP diptych_router_processes Processes of this router that told the metrics of this page\n"
    "# TYPE diptych_router_processes gauge\n"
    "diptych_router_processes {}\n"
)


class MetricsLedger:
    """`render` makes the text of this process."""

    def __init__(self, part: RouterPart, render: Callable[[], bytes]) -> None:
        self._part, self._render = part, render
        self._complained_at = float("-inf")

    def take_over(self) -> None:
        """Add the last text of this process's predecessor to the counters of ended processes."""
        latest, known = self._latest(self._part.index), self._ended(self._part.index)
        if not latest.exists():
            return
        try:
            before = [latest, *known]
            merged_file = self._part.folder / f"{self._part.index}.ended"
            _write(merged_file, counters(list(_contents(before))))
            for file in before:
                if file != merged_file:
                    file.unlink()
        except OSError as error:
            self._complain(error)
            with suppress(OSError):  # a rename needs no disk space
                latest.rename(self._part.folder / f"{self._part.index}.ended.{secrets.token_hex(4)}")

    def tell(self) -> bytes:
        """Return the text of this process, and store it, if the disk is not full, in case the process dies."""
        text = self._render()
        try:
            _write(self._latest(self._part.index), text)
        except OSError as error:
            self._complain(error)
        return text

    def page(self, others: Mapping[int, bytes]) -> bytes:
        """The text of all, by what the others told: of one that did not, its counters of the last time."""
        files = [file for index in range(self._part.count) for file in self._ended(index)]
        files += [self._latest(index) for index in self._part.others if index not in others]
        ended = [counters([text]) for text in _contents(files)]
        texts = {self._part.index: self.tell(), **others}
        return merged(texts, ended) + NUM_TOLD.format(len(texts)).encode()

    def _latest(self, index: int) -> Path:
        return self._part.folder / f"{index}.told"

    def _ended(self, index: int) -> list[Path]:
        names = (f"{index}.ended", f"{index}.ended.*")
        return [file for name in names for file in self._part.folder.glob(name) if file.suffix != NEW]

    def _complain(self, error: OSError) -> None:
        now = time.monotonic()
        if now - self._complained_at >= REMIND_S:
            self._complained_at = now
            log.error("cannot store metrics; if this process dies, its recent counts are lost: %s", error)


def _contents(files: Iterable[Path]) -> Iterator[bytes]:
    """Read the files that exist. A process that takes over may remove some concurrently."""
    for file in files:
        with suppress(FileNotFoundError):
            yield file.read_bytes()


def _write(file: Path, data: bytes) -> None:
    """All or nothing: others read it meanwhile."""
    new = file.with_name(f"{file.name}{NEW}")
    new.write_bytes(data)
    new.rename(file)
