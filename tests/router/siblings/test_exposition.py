from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.siblings.ledger import MetricsLedger, counters, merged
from router.siblings.part import RouterPart


class Process:
    """What one counts."""

    def __init__(self, requests: int, waiting: float, took_s: float, roles: int = 0) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("requests", "Of a path", ["path"], registry=self.registry)
        self.requests.labels('a "b" {c} 1').inc(requests)
        Gauge("waiting", "Now", ["stage"], registry=self.registry).labels("queue").set(waiting)
        Gauge("plain", "Without labels", registry=self.registry).set(waiting)
        Histogram("took_seconds", "Time", buckets=(1.0, 2.0), registry=self.registry).observe(took_s)
        Counter("diptych_role_changes", "Seen by all", registry=self.registry).inc(roles)

    def render(self) -> bytes:
        return generate_latest(self.registry)


def samples(text: bytes) -> dict[tuple[str, str], float]:
    """Values by name, and by labels as text; as a strict reader of the format finds them."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for one in family.samples:
            key = (one.name, " ".join(f"{name}={value}" for name, value in sorted(one.labels.items())))
            assert key not in found
            found[key] = one.value
    return found


def test_counters_add_up_and_gauges_stay_apart() -> None:
    found = samples(merged({0: Process(2, 1.0, 0.5).render(), 1: Process(3, 4.0, 1.5).render()}))
    assert found["requests_total", 'path=a "b" {c} 1'] == 5
    assert found["took_seconds_bucket", "le=1.0"] == 1 and found["took_seconds_bucket", "le=+Inf"] == 2
    assert (found["took_seconds_count", ""], found["took_seconds_sum", ""]) == (2, 2.0)
    assert (found["waiting", "process=0 stage=queue"], found["waiting", "process=1 stage=queue"]) == (1, 4)
    assert (found["plain", "process=0"], found["plain", "process=1"]) == (1, 4)


def test_a_family_has_one_head() -> None:
    text = merged({index: Process(1, 1.0, 0.5).render() for index in range(3)})
    heads = [line for line in text.splitlines() if line.startswith(b"#")]
    assert (
        len(heads)
        == len(set(heads))
        == len([line for line in Process(1, 1, 1).render().splitlines() if line[:1] == b"#"])
    )


def test_what_every_process_counts_is_counted_once() -> None:
    texts = {0: Process(0, 0, 0.1, roles=2).render(), 1: Process(0, 0, 0.1, roles=3).render()}
    assert samples(merged(texts, [Process(0, 0, 0.1, roles=1).render()]))["diptych_role_changes_total", ""] == 3


def test_of_processes_that_ended_only_counters_are_left() -> None:
    found = samples(counters([Process(2, 7.0, 0.5).render(), Process(3, 7.0, 0.5).render()]))
    assert found["requests_total", 'path=a "b" {c} 1'] == 5 and found["took_seconds_count", ""] == 2
    assert not any(name in ("waiting", "plain") for name, _ in found)


def total(page: bytes) -> float:
    return samples(page)["requests_total", 'path=a "b" {c} 1']


def test_no_counter_goes_back_when_a_process_dies(tmp_path: Path) -> None:
    first, second = Process(2, 1.0, 0.5), Process(3, 1.0, 0.5)
    asked, dying = (MetricsLedger(RouterPart(index, 2, tmp_path)) for index in range(2))
    own = first.render()
    assert total(asked.page(own, {1: dying.stored(second.render)})) == 5
    page = asked.page(own, {})  # it is dead
    assert total(page) == 5 and samples(page)["diptych_router_processes", ""] == 1
    for lives in (1, 2):
        successor = MetricsLedger(RouterPart(1, 2, tmp_path))
        successor.take_over()
        assert total(asked.page(own, {})) == 5 + 10 * (lives - 1)
        assert total(asked.page(own, {1: successor.stored(Process(10, 1.0, 0.5).render)})) == 5 + 10 * lives


def test_a_process_that_told_nothing_leaves_nothing(tmp_path: Path) -> None:
    ledger = MetricsLedger(RouterPart(0, 2, tmp_path))
    ledger.take_over()
    assert list(tmp_path.iterdir()) == [] and total(ledger.page(Process(2, 1.0, 0.5).render(), {})) == 2


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_takes_no_page_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, own = MetricsLedger(RouterPart(0, 2, tmp_path)), Process(2, 1.0, 0.5).render()

    def successor(requests: int) -> Callable[[], bytes]:
        ledger = MetricsLedger(RouterPart(1, 2, tmp_path))
        ledger.take_over()
        return partial(ledger.stored, Process(requests, 1.0, 0.5).render)

    assert total(asked.page(own, {1: successor(3)()})) == 5
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        second = successor(10)
        assert total(asked.page(own, {})) == 5
        assert total(asked.page(own, {1: second()})) == 15
    assert total(asked.page(own, {1: second()})) == 15
    third = successor(100)
    assert total(asked.page(own, {1: third()})) == 115
    assert sorted(file.name for file in tmp_path.glob("1.*")) == ["1.ended", "1.latest"]
