"""NIXL's part of a worker: memory that others may read, and reads of theirs, over UCX.

It takes NIXL's bindings rather than its `nixl_agent`, whose progress thread never sleeps: with a delay that thread
waits for the network, and takes 0.01 of a core where nothing is read (docs/decisions/0070-nixl.md).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from enum import Enum, auto
from importlib import import_module
from types import ModuleType
from typing import Any

from common.errors import DiptychError

PROGRESS_US = 1000
"""How long NIXL's thread may sleep although something came that wakes it late; NIXL rounds it up to milliseconds."""

Region = tuple[int, int]  # address and bytes


class NixlError(DiptychError):
    """NIXL is missing, or refused. The message says which."""


class ReadState(Enum):
    UNDER_WAY = auto()
    DONE = auto()
    FAILED = auto()


class NixlAgent:
    """Any thread may call it; NIXL's own thread moves the bytes."""

    def __init__(self, worker_id: str) -> None:
        """Raises NixlError."""
        self._bindings = bindings = load_bindings()
        self.name = f"{worker_id}-{secrets.token_hex(16)}"  # a secret: no other process can take the name
        config = bindings.nixlAgentConfig()
        config.useProgThread, config.useListenThread = True, False
        config.pthrDelay = PROGRESS_US
        config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT  # sender and receiver of a decode worker share it
        try:
            self._agent = bindings.nixlAgent(self.name, config)
            self._backend = self._agent.createBackend("UCX", {})
        except Exception as error:  # the bindings have no common class for their errors
            raise NixlError(f"NIXL cannot use UCX: {error}") from error
        self._kept: list[object] = []  # set last: it must go after the agent

    def keep(self, memory: object) -> None:
        """Do not free this memory before the agent has ended, because reads may still write to it."""
        self._kept.append(memory)

    def register(self, region: Region) -> Any:
        """Let NIXL reach this memory, until `unregister` of what is returned. Raises NixlError."""
        registered = self._bindings.nixlRegDList(self._bindings.DRAM_SEG, [(*region, 0, "")])
        try:
            self._agent.registerMem(registered, [self._backend])
        except Exception as error:
            raise NixlError(f"NIXL cannot register {region[1]:,} bytes: {error}") from error
        return registered

    def unregister(self, registered: Any) -> None:
        self._agent.deregisterMem(registered, [self._backend])

    def metadata(self, registered: Any) -> bytes:
        """What another agent must know to read this memory, and no other."""
        return bytes(self._agent.getLocalPartialMD(registered, True, [self._backend]))

    def connect(self, peer: str, metadata: bytes) -> None:
        """Learn how `peer` is reached. Raises NixlError."""
        try:
            found = self._agent.loadRemoteMD(metadata)
        except Exception as error:
            self.disconnect(peer)  # NIXL keeps what it read before the mistake
            raise NixlError(f"NIXL cannot reach {peer}: {error}") from error
        if (name := found.decode() if isinstance(found, bytes) else str(found)) != peer:
            self.disconnect(name)
            raise NixlError(f"NIXL's metadata is of {name}, not of {peer}")

    def disconnect(self, peer: str) -> None:
        """Reads of this peer that are under way fail."""
        try:
            self._agent.invalidateRemoteMD(peer)
        except Exception:  # it was not connected
            return

    def read(self, peer: str, sources: Sequence[Region], targets: Sequence[Region]) -> Any:
        """Begin to copy each of `peer`'s `sources` to the target with its number. Raises NixlError."""
        bindings = self._bindings
        local, remote = (
            bindings.nixlXferDList(bindings.DRAM_SEG, [(*region, 0) for region in side]) for side in (targets, sources)
        )
        try:
            handle = self._agent.createXferReq(bindings.NIXL_READ, local, remote, peer, b"", [self._backend])
            self._agent.postXferReq(handle, b"")
        except Exception as error:
            raise NixlError(f"NIXL cannot read: {error}") from error
        return handle

    def state(self, handle: Any) -> ReadState:
        try:
            status = self._agent.getXferStatus(handle)
        except Exception:  # the peer has died, or was disconnected
            return ReadState.FAILED
        if status == self._bindings.NIXL_IN_PROG:
            return ReadState.UNDER_WAY
        return ReadState.DONE if status == self._bindings.NIXL_SUCCESS else ReadState.FAILED

    def forget(self, handle: Any) -> None:
        """Give up a read. Its bytes may come all the same, until its peer is disconnected and even after."""
        try:
            self._agent.releaseXferReq(handle)
        except Exception:  # it cannot be called off; NIXL frees it with the agent
            return


def load_bindings() -> ModuleType:
    """NIXL's bindings. Raises NixlError."""
    try:
        return import_module("nixl._bindings")
    except (ImportError, OSError) as error:
        raise NixlError(f"NIXL is not installed, or does not load (pip install 'diptych[nixl]'): {error}") from error
