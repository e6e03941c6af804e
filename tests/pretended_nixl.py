"""NIXL as a receiver sees it: within one process, as late as a test wants, and with writes that nothing calls off."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.engine.transfer.transports.nixl import NixlError, ReadState, Region


@dataclass(eq=False)
class PretendedRead:
    peer: str
    copies: list[tuple[Region, Region]]
    state: ReadState = ReadState.UNDER_WAY


class PretendedNixl:
    """Has the methods of `NixlAgent`. Reads end when `deliver` is called, or at once if `is_prompt`."""

    def __init__(self, *, is_prompt: bool = True) -> None:
        self.name, self.is_prompt = "pretended", is_prompt
        self.connected: list[str] = []
        self.registered: list[Region] = []
        self.reads: list[PretendedRead] = []
        self.kept: list[object] = []
        self.refuses = ""

    def keep(self, memory: object) -> None:
        self.kept.append(memory)

    def register(self, region: Region) -> Any:
        self.registered.append(region)
        return region

    def unregister(self, registered: Any) -> None:
        self.registered.remove(registered)

    def metadata(self, registered: Any) -> bytes:
        return repr(registered).encode()

    def connect(self, peer: str, metadata: bytes) -> None:
        if metadata == b"broken":
            raise NixlError(f"NIXL cannot reach {peer}: its metadata is broken")
        self.connected.append(peer)

    def disconnect(self, peer: str) -> None:
        self.connected.remove(peer)
        for read in self.reads:
            if read.peer == peer and read.state is ReadState.UNDER_WAY:
                read.state = ReadState.FAILED

    def read(self, peer: str, sources: Sequence[Region], targets: Sequence[Region]) -> PretendedRead:
        if self.refuses:
            raise NixlError(self.refuses)
        assert peer in self.connected, "a read of a peer that was disconnected"
        for address, size in targets:
            assert any(a <= address and address + size <= a + n for a, n in self.registered), "not registered"
        self.reads.append(PretendedRead(peer, list(zip(sources, targets, strict=True))))
        if self.is_prompt:
            self.deliver(self.reads[-1])
        return self.reads[-1]

    def deliver(self, read: PretendedRead) -> None:
        """The bytes come, even those of a read that was given up."""
        for (source, size), (target, _) in read.copies:
            ctypes.memmove(target, source, size)
        if read.state is ReadState.UNDER_WAY:
            read.state = ReadState.DONE

    def fail(self, read: PretendedRead) -> None:
        read.state = ReadState.FAILED

    def state(self, handle: PretendedRead) -> ReadState:
        return handle.state

    def forget(self, handle: PretendedRead) -> None:
        """Bytes may come all the same."""
