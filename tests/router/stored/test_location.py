"""Where the store of responses lies, by the settings, and which files are refused."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from common.config import RouterConfig
from common.errors import ConfigError
from router.stored import database, location
from router.stored.errors import StoreFailed
from router.stored.files import FileStore
from router.stored.responses import ResponseStore


def config_of(path: object, **settings: Any) -> RouterConfig:
    return RouterConfig(response_store=str(path), **settings)


def opened(config: RouterConfig) -> str | None:
    """The path of the store that the settings give."""
    store = location.store_of(config, lambda reason: None)
    if store is None:
        return None
    store.close()
    return store.path


def damaged(path: Path) -> None:
    path.write_bytes(b"this is no database" * 100)


def damaged_inside(path: Path) -> None:
    ResponseStore(str(path), max_bytes=1, max_entries=1, max_age_s=1).close()
    data = bytearray(path.read_bytes())
    data[4096 : 5 * 4096] = b"\x07" * (4 * 4096)
    path.write_bytes(data)


def of_something_else(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()


def newer(path: Path) -> None:
    ResponseStore(str(path), max_bytes=1, max_entries=1, max_age_s=1).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


@pytest.mark.parametrize("spoil", [damaged, damaged_inside, of_something_else, newer])
def test_a_file_that_cannot_be_used_refuses_the_start(
    tmp_path: Path, spoil: Callable[[Path], None], monkeypatch: Any
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = location.default_path()
    assert path is not None
    spoil(path)
    before = path.read_bytes()
    for chosen in (path, "auto"):
        with pytest.raises(ConfigError, match=r"response_store=.*move this file away") as caught:
            opened(config_of(chosen))
        assert str(path) in str(caught.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["missing/r.sqlite3", "."])
def test_a_place_that_cannot_be_written_refuses_the_start(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="response_store="):
        opened(config_of(tmp_path / name))


def test_the_default_is_a_file_of_the_users_or_memory(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "state" / "diptych" / "responses.sqlite3"
    assert opened(config_of("auto")) == str(path) and path.parent.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert opened(config_of("auto")) == database.IN_MEMORY
    assert opened(config_of("memory")) == database.IN_MEMORY


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_the_right_to_write_is_memory(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    tmp_path.chmod(0o500)
    assert opened(config_of("auto")) == database.IN_MEMORY


@pytest.mark.slow
def test_routers_that_start_at_once_share_a_new_file(tmp_path: Path) -> None:
    meet = threading.Barrier(4)

    def open_one(path: str) -> None:
        meet.wait(timeout=30)
        ResponseStore(path, max_bytes=10**6, max_entries=10, max_age_s=60).close()

    with ThreadPoolExecutor(4) as routers:
        for number in range(25):
            for opening in [routers.submit(open_one, str(tmp_path / f"{number}.sqlite3")) for _ in range(4)]:
                opening.result(timeout=60)


def test_processes_of_one_router_have_a_file_in_place_of_memory(tmp_path: Path) -> None:
    place = str(tmp_path / "responses.sqlite3")
    stores = [location.store_of(RouterConfig(response_store="memory"), lambda reason: None, place) for _ in range(2)]
    for store in stores:
        assert store is not None and store.path == place and store._max_bytes == 128 * 2**20
        store.close()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores look around often."""
    for kind in (ResponseStore, FileStore):
        defaults: Any = kind.__init__.__kwdefaults__
        monkeypatch.setitem(defaults, "chore_s", 0.05)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("chosen", ["auto", "a file"])
async def test_a_full_disk_at_the_start_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = location.default_path()
    assert path is not None
    opening, reasons = database._opened, list[str]()

    def full(*_: object) -> sqlite3.Connection:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(database, "_opened", full)
    store = location.store_of(config_of("auto" if chosen == "auto" else path), reasons.append)
    assert store is not None and store.path == str(path)
    with pytest.raises(StoreFailed, match="not open, because the disk was full at startup") as failed:
        await store.find("resp_1", "")
    assert failed.value.reason == "full" and set(reasons) == {"full"}
    monkeypatch.setattr(database, "_opened", opening)
    async with asyncio.timeout(30):
        while True:
            try:
                assert await store.find("resp_1", "") is None
                break
            except StoreFailed:
                await asyncio.sleep(0.01)
    store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(command, check=False).returncode:
        pytest.skip("only root mounts file systems, and not in every container")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("left", [0, 4096, 12 * 1024, 36 * 1024])
@pytest.mark.parametrize("exists", [False, True])
async def test_a_disk_that_is_really_full(small_disk: Path, exists: bool, left: int) -> None:
    if exists:
        opened(config_of(small_disk / "r.sqlite3"))
    ballast = small_disk / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    os.truncate(ballast, ballast.stat().st_size - left)
    config = config_of(small_disk / "r.sqlite3")
    store = location.store_of(config, lambda reason: None)
    files = location.file_store_of(config, store, lambda reason: None)
    assert store is not None and files is not None
    for question in (store.find("resp_1", ""), files.find("file-1", "")):
        with pytest.raises(StoreFailed) if not left else suppress(StoreFailed):
            await question
    ballast.unlink()
    async with asyncio.timeout(30):
        while True:
            try:
                assert (await store.find("resp_1", ""), await files.find("file-1", "")) == (None, None)
                break
            except StoreFailed:
                await asyncio.sleep(0.1)
    store.close()
    files.close()
