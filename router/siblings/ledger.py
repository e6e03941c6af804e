"""The metrics of all processes of a router, told by any of them, without a counter ever going back.

    asked ─> each process writes its text to its file, and tells it ─> the one that is asked adds them up
    dead  ─> its file stays, and counts until its successor has put the counters of it among those that ended

A series that fell would look like a restart of the whole router to Prometheus, whose rates would jump. Where the disk
is full the text of a process that runs is answered all the same; what it counted since it was last stored ends with it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from common.observe.logging import REMIND_S
from router.siblings.exposition import counters, merged
from router.siblings.part import RouterPart

log = logging.getLogger(__name__)
NEW = ".new"
"""Ends the name of a file that is being written."""
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
        """Put what the process before this one told last among what ended ones counted."""
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
            with suppress(OSError):  # a rename takes no room
                latest.rename(self._part.folder / f"{self._part.index}.ended.{secrets.token_hex(4)}")

    def tell(self) -> bytes:
        """The text of this process, which is kept for the case that it dies, if the disk has room for it."""
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
            log.error("metrics are not kept for the case that this process dies: %s", error)


def _contents(files: Iterable[Path]) -> Iterator[bytes]:
    """What is in those files that exist: a process that takes over removes some meanwhile."""
    for file in files:
        with suppress(FileNotFoundError):
            yield file.read_bytes()


def _write(file: Path, data: bytes) -> None:
    """All or nothing: others read it meanwhile."""
    new = file.with_name(f"{file.name}{NEW}")
    new.write_bytes(data)
    new.rename(file)
