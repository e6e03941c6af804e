"""Prometheus text of several processes as one. Pure.

Counters and histograms are added up, as one process would have counted. Gauges stay apart, by the label `process`:
some add up, others are views of the same thing, and the reader of a series knows which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

LARGEST = frozenset(("diptych_role_changes_total",))
"""Counters of what all processes see: each counts every change."""
CREATED = "_created"
ADDED = (b"counter", b"histogram", b"summary")


@dataclass(slots=True)
class _Family:
    """`head`: its HELP and TYPE lines. `sums` of samples that are one, by name and labels; `gauges` as lines."""

    head: list[bytes] = field(default_factory=list)
    sums: dict[bytes, float] = field(default_factory=dict)
    gauges: list[bytes] = field(default_factory=list)


def merged(texts: Mapping[int, bytes], ended: Iterable[bytes] = ()) -> bytes:
    """The text of all processes by their numbers; `ended`: counters of processes that are no more.

    All texts are of one program, so that a family's head is the same in each.
    """
    families: dict[bytes, _Family] = {}
    for text in ended:
        _add(families, text, None)
    for index in sorted(texts):
        _add(families, texts[index], index)
    return b"".join(_lines(family) for family in families.values() if family.sums or family.gauges)


def counters(texts: Sequence[bytes]) -> bytes:
    """The families that are added up, alone."""
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
    """The name and labels of a sample, with the label `process`."""
    label = b'process="%d"' % process
    if not sample.endswith(b"}"):
        return b"%b{%b}" % (sample, label)
    return b"%b,%b}" % (sample[:-1], label)


def _lines(family: _Family) -> bytes:
    sums = (b"%b %b" % (sample, repr(value).encode()) for sample, value in family.sums.items())
    return b"".join(b"%b\n" % line for line in (*family.head, *sums, *family.gauges))
