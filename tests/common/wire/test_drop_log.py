"""Dropped frames are told, but a flood of them is not a flood of lines."""

from __future__ import annotations

import logging

import pytest

from common.wire.drop_log import EVERY_S, DropLog


@pytest.fixture
def drops(caplog: pytest.LogCaptureFixture) -> DropLog:
    caplog.set_level(logging.WARNING)
    return DropLog(logging.getLogger("common.test"), "a frame")


def test_the_first_is_told_at_once(drops: DropLog, caplog: pytest.LogCaptureFixture) -> None:
    drops.add("too long", 100.0)
    drops.flush(200.0)
    assert caplog.messages == ["dropped a frame: too long"]


def test_a_flood_is_one_line_an_interval(drops: DropLog, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(1000):
        drops.add(f"reason {number}", 100.0 + number * EVERY_S / 2000)  # half an interval
    assert caplog.messages == ["dropped a frame: reason 0"]
    drops.flush(100.0 + EVERY_S)
    drops.flush(100.0 + 3 * EVERY_S)
    assert caplog.messages[1:] == ["dropped a frame 999 times, last: reason 999"]
    assert drops.num_dropped == 1000


def test_after_a_quiet_time_one_is_told_at_once_again(drops: DropLog, caplog: pytest.LogCaptureFixture) -> None:
    drops.add("first", 100.0)
    drops.add("second", 100.0 + EVERY_S)
    assert caplog.messages == ["dropped a frame: first", "dropped a frame: second"]
