from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from pathlib import Path

import pytest

from common.errors import ConfigError
from router.access import audit as audit_module
from router.access.audit import FLAGS, AuditLog

from ...waiting import wait_until


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_appended_in_order(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    path.write_text('{"n": -1}\n')
    audit = AuditLog(str(path), lambda num: None)
    for n in range(2000):
        audit.write({"n": n})
    audit.close()
    assert [line["n"] for line in lines(path)] == list(range(-1, 2000))


def test_standard_output_will_do(capfd: pytest.CaptureFixture[str]) -> None:
    audit = AuditLog("-", lambda num: None)
    audit.write({"n": 1})
    audit.reopen()
    audit.write({"n": 2})
    audit.close()
    print("still open")
    assert capfd.readouterr().out == '{"n":1}\n{"n":2}\nstill open\n'


@pytest.mark.slow
def test_only_the_owner_may_read_a_new_file(tmp_path: Path) -> None:
    AuditLog(str(tmp_path / "audit.log"), lambda num: None).close()
    assert stat.S_IMODE(os.stat(tmp_path / "audit.log").st_mode) == 0o600


def test_a_file_that_was_moved_is_followed_by_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    audit = AuditLog(str(path), lambda num: None)
    audit.write({"n": 1})
    wait_until(lambda: lines(path))
    path.rename(tmp_path / "audit.log.1")
    audit.write({"n": 2})
    audit.close()
    assert [lines(tmp_path / name) for name in ("audit.log.1", "audit.log")] == [[{"n": 1}], [{"n": 2}]]


@pytest.mark.slow
def test_a_full_queue_loses_lines_and_counts_them(tmp_path: Path) -> None:
    """The writer gives up on a pipe without a reader, and the queue is bounded meanwhile."""
    pipe, dropped = tmp_path / "pipe", list[int]()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    audit = AuditLog(str(pipe), dropped.append, bound=50)
    try:
        began = time.monotonic()
        for n in range(10_000):
            audit.write({"n": n, "pad": "x" * 500})
        assert time.monotonic() - began < 5
        assert sum(dropped) > 1000
    finally:
        os.close(reader)
        audit.close()


def test_a_pipe_without_a_reader_is_no_trap(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="audit_log"):
        AuditLog(str(tmp_path / "pipe"), lambda num: None)


@pytest.mark.slow
def test_a_slow_reader_is_waited_for_however_many_descriptors_are_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that is reopened with a thousand clients connected gets a descriptor too high for `select`."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(path, FLAGS)
    monkeypatch.setattr(audit_module, "_open", lambda _: fcntl.fcntl(writer, fcntl.F_DUPFD, 2000))
    audit = AuditLog(str(path), lambda num: None)
    for n in range(2000):
        audit.write({"n": n, "text": "x" * 100})
    time.sleep(0.1)  # the pipe is full for as long
    got = bytearray()

    def read_all() -> bool:
        with contextlib.suppress(BlockingIOError):
            got.extend(os.read(reader, 4096))
        return got.count(b"\n") == 2000

    wait_until(read_all)
    audit.close()
    os.close(reader)
    os.close(writer)
    assert [json.loads(line)["n"] for line in got.splitlines()] == list(range(2000))


@pytest.mark.slow
def test_a_disk_that_is_full_is_complained_of_once(caplog: pytest.LogCaptureFixture) -> None:
    dropped: list[int] = []
    audit = AuditLog("/dev/full", dropped.append)
    for n in range(3):
        audit.write({"n": n})
        wait_until(lambda n=n: sum(dropped) == n + 1)
    audit.close()
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("audit log: cannot write /dev/full: no space is left")


def test_text_that_is_no_unicode_ends_nothing(tmp_path: Path) -> None:
    path, dropped = tmp_path / "audit.log", list[int]()
    audit = AuditLog(str(path), dropped.append)
    for text in ("\ud800", "good"):
        audit.write({"path": text})
    audit.close()
    assert (lines(path), dropped) == ([{"path": "good"}], [1])


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        AuditLog(str(tmp_path / "nowhere" / "audit.log"), lambda num: None)
