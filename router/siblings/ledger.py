"""The metrics of all processes of a router, told by any of them, without a counter ever going back.

    asked ─> each process writes its text to its file, and tells it ─> the one that is asked adds them up
    dead  ─> its file stays, and counts until its successor has put the counters of it among those that ended

A series that fell would look like a restart of the whole router to Prometheus, whose rates would jump.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from router.siblings.exposition import counters, merged
from router.siblings.part import RouterPart

NUM_TOLD = (
    "# HELP diptych_router_processes Processes of this router that told the metrics of this page\n"
    "# TYPE diptych_router_processes gauge\n"
    "diptych_router_processes {}\n"
)


class MetricsLedger:
    """`render` makes the text of this process."""

    def __init__(self, part: RouterPart, render: Callable[[], bytes]) -> None:
        self._part, self._render = part, render

    def take_over(self) -> None:
        """Put what the process before this one told last among what ended ones counted. Raises OSError."""
        latest, ended = self._latest(self._part.index), self._ended(self._part.index)
        if latest.exists():
            texts = [file.read_bytes() for file in (latest, ended) if file.exists()]
            _write(ended, counters(texts))
            latest.unlink()

    def tell(self) -> bytes:
        """The text of this process, which is kept for the case that it dies. Raises OSError."""
        text = self._render()
        _write(self._latest(self._part.index), text)
        return text

    def page(self, others: Mapping[int, bytes]) -> bytes:
        """The text of all, by what the others told: of one that did not, its counters of the last time."""
        files = [self._ended(index) for index in range(self._part.count)]
        files += [self._latest(index) for index in self._part.others if index not in others]
        ended = [counters([file.read_bytes()]) for file in files if file.exists()]
        texts = {self._part.index: self.tell(), **others}
        return merged(texts, ended) + NUM_TOLD.format(len(texts)).encode()

    def _latest(self, index: int) -> Path:
        return self._part.folder / f"{index}.told"

    def _ended(self, index: int) -> Path:
        return self._part.folder / f"{index}.ended"


def _write(file: Path, data: bytes) -> None:
    """All or nothing: others read it meanwhile."""
    new = file.with_name(f"{file.name}.new")
    new.write_bytes(data)
    new.rename(file)
