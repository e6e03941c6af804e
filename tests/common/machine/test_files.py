"""A file of unknown origin costs bounded time and memory, whatever its file system does."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.machine import files
from common.machine.files import FILE_PART_BYTES, MAX_ABANDONED, read_regular_file


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A file system that answers no `stat` until the event is set."""
    answers, stat = threading.Event(), os.stat

    def wait(path: Any) -> os.stat_result:
        answers.wait(60.0)
        return stat(path)

    monkeypatch.setattr(files.os, "stat", wait)
    yield answers
    answers.set()


def test_a_file_is_read_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(data := os.urandom(2 * FILE_PART_BYTES + 5))
    assert read_regular_file(path, len(data)) == data
    with pytest.raises(OSError, match="the maximum") as caught:
        read_regular_file(path, len(data) - 1)
    assert "it has 2,097,157 bytes; the maximum is 2,097,156" in caught.value.strerror
    with pytest.raises(FileNotFoundError):
        read_regular_file(tmp_path / "none", 1)


def test_a_file_system_that_hangs_is_given_up(tmp_path: Path, hung: threading.Event) -> None:
    (tmp_path / "file").write_bytes(b"x")
    began = time.monotonic()
    for _ in range(MAX_ABANDONED):
        with pytest.raises(OSError, match="no progress"):
            read_regular_file(tmp_path / "file", 1, stall_s=0.05)
    with pytest.raises(OSError, match="earlier reads are still blocked"):
        read_regular_file(tmp_path / "file", 1, stall_s=0.05)
    assert time.monotonic() - began < 30.0  # not the 60 s of the file system
    hung.set()
    until = time.monotonic() + 30.0
    while time.monotonic() < until and files._slots._value < MAX_ABANDONED:
        time.sleep(0.01)
    assert read_regular_file(tmp_path / "file", 1) == b"x"


def test_a_file_that_shrinks_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fstat = tmp_path / "file", os.fstat
    path.write_bytes(bytes(2 * FILE_PART_BYTES))

    def cut(descriptor: int) -> os.stat_result:
        about = fstat(descriptor)
        os.truncate(path, FILE_PART_BYTES)
        return about

    monkeypatch.setattr(files.os, "fstat", cut)
    with pytest.raises(OSError, match="ends after") as caught:
        read_regular_file(path, 2 * FILE_PART_BYTES)
    assert "the file ends after 1,048,576 of 2,097,152 bytes" in caught.value.strerror
