"""Lines while much is read, and a bar only where the terminal is the process's own."""

from __future__ import annotations

import logging

import pytest

from common.observe import progress
from common.observe.progress import ByteProgress, has_terminal, in_bytes

log = logging.getLogger("test.progress")


def test_a_line_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    times = iter((0.0, 4.0, 9.9, 10.0, 15.0, 20.5, 20.6, 20.5))
    with (
        caplog.at_level(logging.INFO),
        ByteProgress("weights", "read", 16 * 10**9, log, bar=False, clock=lambda: next(times)) as shown,
    ):
        for _ in range(5):
            shown.add(3 * 10**9)
        shown.add(5 * 10**9)  # what is counted twice does not exceed the whole
        assert (shown.count, shown.seconds) == (16 * 10**9, 20.5)
    assert caplog.messages == ["weights: 9.0 of 16.0 GB read", "weights: 15.0 of 16.0 GB read"]


def test_a_bar_replaces_the_lines(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    times = iter((0.0, 11.0))
    with (
        caplog.at_level(logging.INFO),
        ByteProgress("weights", "read", 4000, log, bar=True, clock=lambda: next(times)) as shown,
    ):
        shown.add(4000)
    assert not caplog.messages
    assert "weights" in capfd.readouterr().err


def test_output_that_is_no_terminal_gets_lines(capfd: pytest.CaptureFixture[str]) -> None:
    assert not has_terminal()


def test_a_terminal_of_another_foreground_process_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.os, "tcgetpgrp", lambda _: progress.os.getpgrp() + 1)
    assert not has_terminal()
    monkeypatch.setattr(progress.os, "tcgetpgrp", lambda _: progress.os.getpgrp())
    assert has_terminal()


def test_sizes() -> None:
    assert (in_bytes(93_000_000), in_bytes(16_100_000_000)) == ("93.0 MB", "16.1 GB")
