"""The file of KV blocks: what a restart finds in it, and what is wrong with it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from common.engine.kv.tiers.block_file import PAGE, BlockFile, slots_within
from common.errors import ConfigError

BLOCK_BYTES, NUM_SLOTS = 5000, 7


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def content(number: int) -> memoryview:
    return memoryview(bytes([number]) * BLOCK_BYTES)


def opened(path: Path, fingerprint: str = "layout", num_slots: int = NUM_SLOTS) -> BlockFile:
    return BlockFile(path, fingerprint, BLOCK_BYTES, num_slots)


def read(file: BlockFile, slot: int, number: int) -> bytes | None:
    into = memoryview(bytearray(BLOCK_BYTES))
    return bytes(into) if file.read(slot, digest(number), into) else None


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with blocks 1, 2 and 3 in slots 4, 0 and 2, closed as a dead process leaves it."""
    file = opened(tmp_path / "blocks")
    for number, slot in ((1, 4), (2, 0), (3, 2)):
        file.write(slot, digest(number), content(number))
    file.close()
    return tmp_path / "blocks"


def test_a_restart_finds_every_block_in_the_order_of_writing(path: Path) -> None:
    file = opened(path)
    assert file.found == [(2, 0, digest(2)), (3, 2, digest(3)), (1, 4, digest(1))]
    assert [read(file, slot, number) for number, slot in ((1, 4), (2, 0), (3, 2))] == [content(n) for n in (1, 2, 3)]
    assert read(file, 4, 2) is None and read(file, 1, 1) is None  # another block's slot, and an empty one
    file.write(1, digest(9), content(9))
    file.close()
    again = opened(path)
    assert max(again.found) == (4, 1, digest(9))
    again.close()


def test_it_is_this_users_alone_and_within_its_bound(path: Path) -> None:
    path.chmod(0o644)
    file = opened(path)
    file.write(NUM_SLOTS - 1, digest(8), content(8))
    file.close()
    assert path.stat().st_mode & 0o777 == 0o600
    bound = path.stat().st_size + PAGE
    assert slots_within(bound, BLOCK_BYTES) >= NUM_SLOTS > slots_within(path.stat().st_size - 2 * PAGE, BLOCK_BYTES)
    assert slots_within(PAGE, BLOCK_BYTES) == 0


@pytest.mark.parametrize("where", ["block", "hash", "checksum"])
def test_a_flipped_bit_costs_the_block_and_nothing_else(path: Path, where: str) -> None:
    entry = PAGE + 4 * 40  # of slot 4
    at = {"block": 2 * PAGE + 4 * 2 * PAGE + 4999, "hash": entry + 15, "checksum": entry + 17}[where]
    with path.open("r+b") as raw:
        raw.seek(at)
        byte = raw.read(1)[0]
        raw.seek(at)
        raw.write(bytes([byte ^ 16]))
    file = opened(path)
    assert read(file, 4, 1) is None
    assert read(file, 0, 2) == content(2)
    assert len(file.found) == (3 if where == "block" else 2)
    file.close()


def test_a_write_that_was_torn_is_seen(path: Path) -> None:
    with path.open("r+b") as raw:  # the block of a new writing, behind the entry of the one before
        raw.seek(2 * PAGE)
        raw.write(content(6)[:3000])
    file = opened(path)
    assert read(file, 0, 2) is None and read(file, 2, 3) == content(3)
    file.close()
    os.truncate(path, 2 * PAGE + 2 * 2 * PAGE + 100)
    file = opened(path)
    assert read(file, 2, 3) is None and read(file, 4, 1) is None
    file.close()


def test_blocks_of_another_layout_are_emptied_with_a_word(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = opened(path, "other")
    assert file.found == [] and read(file, 0, 2) is None
    assert "a different layout (fingerprint layout, 7 slots of 5000 bytes)" in caplog.text
    file.close()
    assert opened(path, "other").found == []


@pytest.mark.parametrize("written", [0, 20])
def test_a_full_disk_leaves_a_file_that_is_opened_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """The next worker must not take a header that could not be written for another program's file."""
    write = os.pwrite

    def full(descriptor: int, data: bytes, at: int) -> int:
        write(descriptor, data[:written], at)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            opened(tmp_path / "new")
    file = opened(tmp_path / "new")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            file.clear()
    file.close()
    opened(tmp_path / "new").close()


def test_a_file_of_anything_else_is_left_alone(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("not ours")
    with pytest.raises(ConfigError, match="a new path or an existing KV block file"):
        opened(notes)
    assert notes.read_text() == "not ours"
    (tmp_path / "link").symlink_to(notes)
    with pytest.raises(OSError):
        opened(tmp_path / "link")


def test_two_workers_cannot_have_one_file(path: Path) -> None:
    file = opened(path)
    with pytest.raises(ConfigError, match="a file that no other worker uses"):
        opened(path)
    assert read(file, 4, 1) == content(1)
    file.close()
    opened(path).close()


def test_a_full_disk_is_named_with_its_free_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = BlockFile(tmp_path / "kv", "f", 100, 4)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        OSError, match=f"cannot write {tmp_path}/kv: no space is left on the disk .4,096 bytes are needed"
    ):
        file.write(0, b"h" * 32, memoryview(bytes(100)))
    file.close()
