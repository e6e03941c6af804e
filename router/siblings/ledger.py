"""Metrics of all processes of a router, available from any process, with counters that never decrease.

    scrape  ─> each process stores and returns its text ─> the scraped process merges all texts
    restart ─> the old text counts until the new process has added its counters to those of ended processes

A decreasing counter would look like a restart of the whole router to Prometheus, and rates would jump. If the disk is
full, a running process still returns its text, but counts since its last stored text are lost when it dies.

Counters and histograms are summed, as if a single process had counted. Gauges are kept separate by the label `process`,
because only the reader knows whether they add up or describe the same object.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from common.machine import write_failure
from common.observe import REMIND_S
from router.siblings.part import RouterPart

LARGEST = frozenset(("diptych_role_changes_total",))
"""Counters that every process increments for the same events. The largest value is used."""
CREATED = "_created"
ADDED = (b"counter", b"histogram", b"summary")
log = logging.getLogger(__name__)
NEW = ".new"
"""Suffix of a file that is being written."""
NUM_PROCESSES = (
    "# HELP diptych_router_processes Number of router processes included in these metrics\n"
    "# TYPE diptych_router_processes gauge\n"
    "diptych_router_processes {}\n"
)


@dataclass(slots=True)
class _Family:
    """A metric family: HELP and TYPE lines (`head`), summed samples by name and labels, and lines of gauges."""

    head: list[bytes] = field(default_factory=list)
    sums: dict[bytes, float] = field(default_factory=dict)
    gauges: list[bytes] = field(default_factory=list)


def merged(texts: Mapping[int, bytes], ended: Iterable[bytes] = ()) -> bytes:
    """Merge the texts of running processes, by process number, and the counters of ended ones.

    All texts must come from the same program version, because each family's HELP and TYPE are taken from the first.
    """
    families: dict[bytes, _Family] = {}
    for text in ended:
        _add(families, text, None)
    for index in sorted(texts):
        _add(families, texts[index], index)
    return b"".join(_lines(family) for family in families.values() if family.sums or family.gauges)


def counters(texts: Sequence[bytes]) -> bytes:
    """Return only the families that are summed."""
    return merged({}, texts)


def _add(families: dict[bytes, _Family], text: bytes, process: int | None) -> None:
    family, name, kind = _Family(), b"", b""
    for line in text.splitlines():
        if line.startswith(b"# "):
            word, of = line.split(b" ", 3)[1:3]
            if of != name:
                name, is_new = of, of not in families
                family = families.setdefault(of, _Family())
            if is_new:
                family.head.append(line)
            if word == b"TYPE":
                kind = line.rpartition(b" ")[2]
            continue
        sample, _, number = line.rpartition(b" ")
        value = float(number)
        if name.endswith(CREATED.encode()):
            family.sums[sample] = min(value, family.sums.get(sample, value))
        elif kind not in ADDED:
            if process is not None:
                family.gauges.append(b"%b %b" % (_labelled(sample, process), number))
        elif name.decode() in LARGEST:
            family.sums[sample] = max(value, family.sums.get(sample, value))
        else:
            family.sums[sample] = value + family.sums.get(sample, 0.0)


def _labelled(sample: bytes, process: int) -> bytes:
    """Add the label `process` to the name and labels of a sample."""
    label = b'process="%d"' % process
    if not sample.endswith(b"}"):
        return b"%b{%b}" % (sample, label)
    return b"%b,%b}" % (sample[:-1], label)


def _lines(family: _Family) -> bytes:
    sums = (b"%b %b" % (sample, repr(value).encode()) for sample, value in family.sums.items())
    return b"".join(b"%b\n" % line for line in (*family.head, *sums, *family.gauges))


class MetricsLedger:
    """Stores and merges metrics. Its methods may run in threads, `stored` in one at a time."""

    def __init__(self, part: RouterPart) -> None:
        self._part = part
        self._logged_at = float("-inf")

    def take_over(self) -> None:
        """Add the last text of the previous process with this number to the counters of ended processes."""
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
            self._log_failure(error)
            with suppress(OSError):  # renaming requires no disk space
                latest.rename(self._part.folder / f"{self._part.index}.ended.{secrets.token_hex(4)}")

    def stored(self, render: Callable[[], bytes]) -> bytes:
        """Return the rendered text of this process. Also store it, unless the disk is full, in case it dies."""
        text = render()
        try:
            _write(self._latest(self._part.index), text)
        except OSError as error:
            self._log_failure(error)
        return text

    def page(self, own: bytes, others: Mapping[int, bytes]) -> bytes:
        """Merge all texts. For processes that are missing in `others`, use their last stored counters."""
        files = [file for index in range(self._part.count) for file in self._ended(index)]
        files += [self._latest(index) for index in self._part.others if index not in others]
        ended = [counters([text]) for text in _contents(files)]
        texts = {self._part.index: own, **others}
        return merged(texts, ended) + NUM_PROCESSES.format(len(texts)).encode()

    def _latest(self, index: int) -> Path:
        return self._part.folder / f"{index}.latest"

    def _ended(self, index: int) -> list[Path]:
        names = (f"{index}.ended", f"{index}.ended.*")
        return [file for name in names for file in self._part.folder.glob(name) if file.suffix != NEW]

    def _log_failure(self, error: OSError) -> None:
        now = time.monotonic()
        if now - self._logged_at >= REMIND_S:
            self._logged_at = now
            why = write_failure(self._part.folder, error)
            log.error("cannot store metrics: counts since the last scrape are lost if this process dies: %s", why)


def _contents(files: Iterable[Path]) -> Iterator[bytes]:
    """Yield the contents of the files that exist. A process that starts may remove files concurrently."""
    for file in files:
        with suppress(FileNotFoundError):
            yield file.read_bytes()


def _write(file: Path, data: bytes) -> None:
    """Write a file atomically, because others read it concurrently."""
    new = file.with_name(f"{file.name}{NEW}")
    new.write_bytes(data)
    new.rename(file)
