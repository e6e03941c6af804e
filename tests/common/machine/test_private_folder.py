"""Folders of processes: private, removed at the end, and by the next process if one was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.machine import private_folder
from common.machine.private_folder import FOLDER_LOCK, PrivateFolder, remove_private_folders

OWNER = """
import sys
from common.machine import PrivateFolder
print(PrivateFolder("owner").path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(private_folder, "MAX_PARENT_CHARS", len(str(tmp_path)))
    return tmp_path


def test_a_folder_is_private_and_ends_with_its_block(parent: Path) -> None:
    with PrivateFolder("test") as folder:
        assert folder.path.parent == parent and folder.path.stat().st_mode & 0o077 == 0
        (folder.path / "file").touch()
        assert [file.name for file in folder.path.iterdir() if file.name != "file"] == [FOLDER_LOCK]
    assert not list(parent.iterdir())
    folder.close()


def test_a_process_that_exits_at_once_can_remove_its_folders(parent: Path) -> None:
    for name in ("a", "b"):
        PrivateFolder(name)
    remove_private_folders()
    assert not list(parent.iterdir())


def test_the_folder_of_a_killed_process_is_removed_by_another(parent: Path) -> None:
    command = [sys.executable, "-P", "-c", OWNER]
    with subprocess.Popen(
        command, env={"TMPDIR": str(parent)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        with PrivateFolder("test"):
            assert left.exists()
            owner.kill()
            owner.wait()
    assert not list(parent.iterdir())


def test_a_folder_whose_removal_is_interrupted_is_removed_by_another(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process exits, for instance. A folder without its lock would be left forever."""
    folder = PrivateFolder("test")
    for name in ("a", "z"):
        (folder.path / name).mkdir()
    remove, removed = os.unlink, []

    def interrupted(path: Any, **given: Any) -> None:
        removed.append(path)
        remove(path, **given)
        raise KeyboardInterrupt

    (folder.path / "z" / "file").touch()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "unlink", interrupted)
        folder.close()
    assert removed and folder.path.exists()
    folder._lock.close()
    PrivateFolder("next").close()
    assert not list(parent.iterdir())


def test_a_symbolic_link_to_a_folder_is_not_followed(parent: Path) -> None:
    target = parent / "target"
    target.mkdir()
    for name in (FOLDER_LOCK, "file"):
        (target / name).touch()
    (parent / "diptych-link").symlink_to(target)
    PrivateFolder("test").close()
    assert sorted(file.name for file in target.iterdir()) == ["file", FOLDER_LOCK]


@pytest.mark.parametrize("make", [os.mkfifo, lambda lock: lock.symlink_to("file")], ids=["fifo", "link"])
def test_a_folder_whose_lock_is_no_regular_file_is_left(parent: Path, make: Callable[[Path], None]) -> None:
    """Opening a FIFO would wait forever."""
    folder = parent / "diptych-other"
    folder.mkdir()
    (folder / "file").touch()
    make(folder / FOLDER_LOCK)
    PrivateFolder("test").close()
    assert (folder / "file").exists()


def test_a_folder_of_another_user_is_left(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = parent / "diptych-other"
    folder.mkdir()
    (folder / FOLDER_LOCK).touch()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    PrivateFolder("test").close()
    assert folder.exists()


def test_a_long_path_of_temporary_files_is_not_used_for_sockets(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_folder, "MAX_PARENT_CHARS", len(str(parent)) - 1)
    with PrivateFolder("test") as folder:
        assert folder.path.parent == Path("/tmp")
