"""Persistent file of KV blocks: fixed-size slots and a table of their contents.

    header, 4 KiB | table, one entry per slot, whole pages | slots, whole pages each

The header identifies the block layout; a file with a different layout is emptied. A block is written before its entry,
without fsync, so after a crash a slot may contain anything. Each entry has a checksum of itself and its slot number,
and one of its block. Torn writes are therefore detected on read and treated as missing blocks.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import xxhash

from common.blocks import DIGEST_BYTES
from common.errors import ConfigError, InUseError
from common.machine import write_failure

log = logging.getLogger(__name__)
PAGE = 4096
"""Alignment of slots, in bytes, for disk reads."""
FORMAT = "diptych-kv-blocks-1"
_ENTRY = struct.Struct(f"<{DIGEST_BYTES}sQQQ")
"""Block hash, xxh3-64 of the block, write number, and xxh3-64 of these three and the slot number."""
_EMPTY = bytes(_ENTRY.size)
_HEAD = struct.Struct(f"<{DIGEST_BYTES}sQQ")


def slots_within(num_bytes: int, block_bytes: int) -> int:
    """Return the number of blocks that fit in a file of at most `num_bytes`."""
    each = _whole_pages(block_bytes) + _ENTRY.size
    return max(0, (num_bytes - 2 * PAGE) // each)


class BlockFile:
    """Block file locked by one process. Threads may call `read` and `write` concurrently for different slots.

    `found`: (write number, slot, hash) of the blocks present when the file was opened.
    """

    def __init__(self, path: Path, fingerprint: str, block_bytes: int, num_slots: int) -> None:
        """Raises ConfigError if another process uses the path or the file is not a KV block file, or OSError."""
        self.path, self.block_bytes, self.num_slots = path, block_bytes, num_slots
        self._table_at, self._stride = PAGE, _whole_pages(block_bytes)
        self._slots_at = PAGE + _whole_pages(num_slots * _ENTRY.size)
        shape = {"format": FORMAT, "fingerprint": fingerprint, "block_bytes": block_bytes, "num_slots": num_slots}
        self._header = (json.dumps(shape) + "\n").encode().ljust(PAGE, b"\0")
        self._fd = _opened(path)
        try:
            _lock(self._fd, path)
            self.found = list(self._begin())
        except BaseException:
            os.close(self._fd)
            raise
        self._last_write = max((number for number, _, _ in self.found), default=0)

    def write(self, slot: int, block_hash: bytes, block: memoryview) -> None:
        """Write a block. If it raises OSError, the contents of the slot are undefined."""
        self._last_write += 1
        head = _HEAD.pack(block_hash, xxhash.xxh3_64_intdigest(block), self._last_write)
        try:
            _write_all(self._fd, block, self._slots_at + slot * self._stride)
            _write_all(self._fd, memoryview(head + _seal(slot, head)), self._entry_at(slot))
        except OSError as error:
            raise OSError(error.errno, write_failure(self.path, error, self._stride)) from error

    def read(self, slot: int, block_hash: bytes, into: memoryview) -> bool:
        """Read the block into `into`; False if the slot does not contain it intact. Raises OSError."""
        entry = os.pread(self._fd, _ENTRY.size, self._entry_at(slot))
        head, seal = entry[: _HEAD.size], entry[_HEAD.size :]
        if len(entry) < _ENTRY.size or seal != _seal(slot, head):
            return False
        found, checksum, _ = _HEAD.unpack(head)
        at, done = self._slots_at + slot * self._stride, 0
        while found == block_hash and done < len(into):
            if not (num_read := os.preadv(self._fd, [into[done:]], at + done)):
                return False
            done += num_read
        return bool(found == block_hash and xxhash.xxh3_64_intdigest(into) == checksum)

    def clear(self) -> None:
        """Drop all blocks and free their disk space. The file is empty even if it raises OSError."""
        os.ftruncate(self._fd, 0)
        try:
            _write_all(self._fd, memoryview(self._header), 0)
        except OSError:
            os.ftruncate(self._fd, 0)  # a partial header would look like another program's file
            raise
        os.ftruncate(self._fd, self._slots_at)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _begin(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield the entries of an existing file. A new file, or one with another layout, is initialised and empty."""
        header = os.pread(self._fd, PAGE, 0)
        if header != self._header:
            self._check_ours(header)
            self.clear()
            return
        num_bytes = self.num_slots * _ENTRY.size
        table = b""
        while len(table) < num_bytes and (more := os.pread(self._fd, num_bytes - len(table), PAGE + len(table))):
            table += more
        for slot in range(len(table) // _ENTRY.size):
            entry = table[slot * _ENTRY.size : (slot + 1) * _ENTRY.size]
            if entry != _EMPTY and entry[_HEAD.size :] == _seal(slot, entry[: _HEAD.size]):
                block_hash, _, number = _HEAD.unpack(entry[: _HEAD.size])
                yield number, slot, block_hash

    def _check_ours(self, header: bytes) -> None:
        """Raise ConfigError if the file has other contents, which must not be overwritten."""
        if not header:
            return
        try:
            was = json.loads(header.rstrip(b"\0"))
            ours = isinstance(was, dict) and was.get("format") == FORMAT
        except ValueError:
            ours = False
        if not ours:
            raise ConfigError("kv_disk_path", str(self.path), "a new path or an existing KV block file")
        log.warning(
            "emptied %s: it contained KV blocks of a different layout (fingerprint %s, %s slots of %s bytes); "
            "this worker uses %d slots of %d bytes",
            *(self.path, was.get("fingerprint"), was.get("num_slots"), was.get("block_bytes")),
            *(self.num_slots, self.block_bytes),
        )

    def _entry_at(self, slot: int) -> int:
        return self._table_at + slot * _ENTRY.size


def _opened(path: Path) -> int:
    """Open a regular file accessible only to this user. Raises ConfigError or OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ConfigError("kv_disk_path", str(path), "a regular file that belongs to this user")
        if stat.S_IMODE(status.st_mode) != 0o600:
            os.fchmod(fd, 0o600)  # KV is derived from prompts
    except BaseException:
        os.close(fd)
        raise
    return fd


def _lock(fd: int, path: Path) -> None:
    """Lock the file until the process ends, however it ends."""
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InUseError("kv_disk_path", str(path), "a file that no other worker uses: one per worker") from None


def _seal(slot: int, head: bytes) -> bytes:
    return xxhash.xxh3_64_digest(head + slot.to_bytes(8, "little"))


def _write_all(fd: int, block: memoryview, at: int) -> None:
    done = 0
    while done < len(block):
        done += os.pwrite(fd, block[done:], at + done)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
