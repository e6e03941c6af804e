"""NIXL: the receiver reads the sender's cache, or its ring of slots, from any host, over UCX.

NIXL cannot cancel a read, so an abandoned read may still write when its peer resumes. Reads therefore do not target the
cache: the blocks of a message are read into a slot of dedicated memory, then copied from there and verified. The slot
of an abandoned read is quarantined for a while. A later write cannot corrupt a block undetected, because a block
counts only if its checksum in the cache matches.

    waiting ──a slot is free──> reading ──> buffered, or failed with all other reads of its memory

Uses NIXL's bindings rather than its `nixl_agent`, whose progress thread never sleeps. With a delay, the thread waits
for the network and uses 1 % of a core when idle (docs/decisions/0070-nixl.md).
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from common.engine.kv import BlocksInPlace
from common.engine.transfer.frames import FRAME_TARGET_BYTES
from common.engine.transfer.transports.interface import (
    Copied,
    IncomingEnd,
    ReadAheadMemory,
    ReadEnded,
    TransferCache,
    Transport,
    copy_on_host,
)
from common.engine.transfer.transports.numbered import NumberedBlocks
from common.engine.transfer.transports.shm import shared_ring
from common.errors import ConfigError, DiptychError
from common.packages import install_command
from common.wire.messages import KVBlocks, KVOffer

if TYPE_CHECKING:
    from common.engine.kv import BlockRing, IncomingBlocks, OutgoingBlocks
    from common.engine.transfer.receiver import IncomingTransfer
    from common.engine.transfer.transports.tcp import Frames

NAME = "nixl"
MAX_REMOTE_BYTES = 32 * 1024
"""Maximum size of NIXL's metadata of an agent: a few hundred bytes per network device of the host."""
NUM_SLOTS = 16
"""Concurrent reads of messages, about 2 MiB each: enough to saturate a network while the thread copies others."""
MOST_OF_ONE = NUM_SLOTS // 2
"""Maximum slots used by the reads of one memory, so that an unresponsive peer leaves slots for others."""
MAX_WAITING = 16_384
"""Maximum number of messages waiting for a slot: more than any prompt has blocks."""
READ_S = 10.0
"""Read timeout, in seconds: 2 MiB at 0.2 MB/s."""
LATE_S = 20.0
"""Quarantine of the slot of an abandoned read, in seconds. It is shorter than the retry interval of its memory
(`RETRY_S`), so that one memory that fails repeatedly never occupies more than its share of slots."""
LOOK_MS = 1
"""Poll interval, in milliseconds, for active reads: NIXL provides no descriptor to wait for."""
PROGRESS_US = 1000
"""Maximum sleep of NIXL's thread, in microseconds, if a wake-up arrives late. NIXL rounds it up to milliseconds."""

Region = tuple[int, int]  # address and bytes


class KVRemote(msgspec.Struct, frozen=True, array_like=True):
    """Offer of memory that NIXL reads from any host: a worker's blocks, or ring slots (`is_ring`).

    `metadata` is NIXL's own: how to connect to `agent`, and the keys for the `num_bytes` bytes at `address`.
    `slot_bytes` is the distance between slots, which may contain shorter blocks; 0 is the size of a block.
    """

    agent: Annotated[str, Meta(min_length=1, max_length=256)]
    metadata: Annotated[bytes, Meta(min_length=1, max_length=MAX_REMOTE_BYTES)]
    address: Annotated[int, Meta(ge=1, le=2**62)]
    num_bytes: Annotated[int, Meta(ge=1, le=2**50)]
    is_ring: bool = False
    slot_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 0


class NixlTransport(Transport):
    """Transport `nixl`. If either side has no NIXL, blocks are sent as frames."""

    name = NAME

    def __init__(self, worker_id: str, *, is_required: bool = False, device_index: int = 0) -> None:
        super().__init__(worker_id, is_required=is_required)
        try:
            self._agent = NixlAgent(worker_id)
        except NixlError as error:
            raise _refused(error) from error

    def outgoing(self, kv: TransferCache, blocks: OutgoingBlocks, frames: Frames) -> RemoteBlocks | None:
        ring = shared_ring(blocks, kv.num_blocks)
        memory = blocks if ring is None and isinstance(blocks, BlocksInPlace) else ring
        try:
            return RemoteBlocks(frames, self._agent, memory.region, ring) if memory is not None else None
        except NixlError as error:
            raise _refused(error) from error

    def incoming(self, kv: TransferCache, blocks: IncomingBlocks) -> RemoteReads:
        try:
            return RemoteReads(self._agent, kv.wire_bytes)
        except NixlError as error:
            raise _refused(error) from error


def _refused(error: NixlError) -> ConfigError:
    return ConfigError("kv_transport", "nixl", f"auto, tcp or shm: {error}")


class RemoteBlocks(NumberedBlocks):
    """Offers a `region` that contains the cache or, with a `ring`, its slots."""

    transport = NAME

    def __init__(self, frames: Frames, agent: NixlAgent, region: Region, ring: BlockRing | None = None) -> None:
        """The memory must outlive this object. Raises NixlError."""
        super().__init__(frames, ring)
        self._offered = OfferedMemory(
            agent, region, is_ring=ring is not None, slot_bytes=ring.block_bytes if ring else 0
        )
        self._offer = KVOffer.of(NAME, self._offered.offer)

    @property
    def offer(self) -> KVOffer:
        return self._offer

    @property
    def description(self) -> str:
        ring = self.ring
        return f"NIXL, through a ring of {ring.num_slots} slots" if ring is not None else "NIXL"

    def close(self) -> None:
        self._offered.close()
        super().close()


class OfferedMemory:
    """Blocks of this worker, or ring slots, that others may read until `close`."""

    def __init__(self, agent: NixlAgent, region: Region, *, is_ring: bool, slot_bytes: int = 0) -> None:
        """The memory must outlive this object. Raises NixlError."""
        self._agent, self._registered = agent, agent.register(region)
        metadata = agent.metadata(self._registered)
        if len(metadata) > MAX_REMOTE_BYTES:
            agent.unregister(self._registered)
            raise NixlError(
                f"NIXL's metadata of this host's networks has {len(metadata):,} bytes, more than {MAX_REMOTE_BYTES:,}: "
                "restrict them to those for KV with UCX_NET_DEVICES"
            )
        self.offer = KVRemote(agent.name, metadata, *region, is_ring, slot_bytes)

    def close(self) -> None:
        self._agent.unregister(self._registered)


class RemoteMemory(ReadAheadMemory):
    """Reader side of an offer."""

    transport = NAME

    def __init__(self, offer: KVRemote, reads: RemoteReads) -> None:
        self.offer, self._reads = offer, reads

    @property
    def is_ring(self) -> bool:
        return self.offer.is_ring

    @property
    def description(self) -> str:
        return "NIXL"

    def regions(self, sources: Sequence[int], sizes: Sequence[int]) -> list[Region] | None:
        """Return the regions of these blocks; None if one is beyond the memory."""
        offer = self.offer
        begins = [source * (offer.slot_bytes or size) for source, size in zip(sources, sizes, strict=True)]
        if any(begin + size > offer.num_bytes for begin, size in zip(begins, sizes, strict=True)):
            return None
        return [(offer.address + begin, size) for begin, size in zip(begins, sizes, strict=True)]

    def begin(self, peer: bytes, header: KVBlocks, sizes: Sequence[int]) -> str:
        return self._reads.begin(peer, header, self, sizes)

    def close(self) -> None:
        self._reads.disconnect(self)


@dataclass(frozen=True, slots=True)
class BufferedBlocks:
    """Blocks of one message, read into memory outside the cache."""

    blocks: dict[int, memoryview]
    """Blocks by their index in the sender's memory."""

    def read(self, source: int, target: memoryview) -> bool:
        """Copy a block to `target`. False if it does not exist or has another size."""
        if (block := self.blocks.get(source)) is None or len(block) != len(target):
            return False
        target[:] = block
        return True

    def copy(self, header: KVBlocks, transfer: IncomingTransfer, into: IncomingBlocks) -> Copied:
        return copy_on_host(self.read, header, transfer, into)


@dataclass(slots=True, eq=False)
class RemoteRead:
    """Read of the blocks named in one message, into a slot. `ended` is its result for the receiver."""

    ended: ReadEnded
    memory: RemoteMemory
    sizes: Sequence[int]
    slot: int = -1
    handle: Any = None
    until: float = 0.0


class RemoteReads(IncomingEnd[KVRemote]):
    """Concurrent reads of one receiver from the memory of other workers."""

    transport = NAME
    details = KVRemote

    def __init__(self, agent: NixlAgent, block_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`block_bytes`: size of the largest block. Raises NixlError."""
        self._agent, self._clock = agent, clock
        self._slots = np.zeros((NUM_SLOTS, max(FRAME_TARGET_BYTES, block_bytes)), np.uint8)
        self._registered = agent.register((self._slots.ctypes.data, self._slots.nbytes))
        self._free = deque(range(NUM_SLOTS))
        self._late: deque[tuple[float, int]] = deque()
        self._waiting: deque[RemoteRead] = deque()
        self._under_way: list[RemoteRead] = []
        self._held: Counter[RemoteMemory] = Counter()

    def accept(self, offer: KVRemote) -> RemoteMemory:
        """Raises NixlError."""
        self._agent.connect(offer.agent, offer.metadata)
        return RemoteMemory(offer, self)

    def disconnect(self, memory: RemoteMemory, why: str = "its worker has a new offer") -> None:
        """Stop reading from the memory. Active reads fail."""
        if not memory.failed:
            memory.failed = why
            self._agent.disconnect(memory.offer.agent)

    @property
    def poll_ms(self) -> int | None:
        return LOOK_MS if self._under_way or self._waiting else None

    def begin(self, peer: bytes, header: KVBlocks, memory: RemoteMemory, sizes: Sequence[int]) -> str:
        """Read the blocks named in a message as soon as a slot is free. Returns the problem, or ""."""
        if memory.failed:
            return memory.failed
        if (num_bytes := sum(sizes)) > self._slots.shape[1]:
            return f"message names {num_bytes:,} bytes of blocks, more than {self._slots.shape[1]:,}"
        if memory.regions(header.sources, sizes) is None:
            return f"message names blocks beyond the {memory.offer.num_bytes:,} bytes offered"
        if len(self._waiting) >= MAX_WAITING:
            return f"too many messages waiting to be read (limit {MAX_WAITING})"
        self._waiting.append(RemoteRead(ReadEnded(peer, header), memory, sizes))
        self._post()
        return ""

    def ended(self) -> Iterator[ReadEnded]:
        """Yield completed reads. The buffered blocks of each are valid until the next one is requested."""
        now = self._clock()
        for read in list(self._under_way):
            state = ReadState.FAILED if read.memory.failed else self._agent.state(read.handle)
            if state is ReadState.UNDER_WAY and now < read.until:
                continue
            self._under_way.remove(read)
            self._held[read.memory] -= 1
            self._agent.forget(read.handle)
            if state is ReadState.DONE:
                places = self._places(read.slot, read.sizes)
                numbered = zip(read.ended.header.sources, places, strict=True)
                read.ended.buffered = BufferedBlocks({source: block.data for source, block in numbered})
                yield read.ended
                self._free.append(read.slot)
            else:
                late = f"no answer for {READ_S:g} s" if state is ReadState.UNDER_WAY else "NIXL reports an error"
                self.disconnect(read.memory, f"reading from {read.memory.offer.agent} failed: {late}")
                self._late.append((now + LATE_S, read.slot))
                read.ended.problem = read.memory.failed
                yield read.ended
        yield from self._failed_waiting()
        while self._late and self._late[0][0] <= now:
            self._free.append(self._late.popleft()[1])
        self._post()

    def close(self) -> None:
        """Release the slots, after the thread has ended. Abandoned reads may still write to them."""
        for read in self._under_way:
            self._agent.forget(read.handle)
        if self._under_way or self._late:
            self._agent.keep(self._slots)
        else:
            self._agent.unregister(self._registered)

    def _failed_waiting(self) -> Iterator[ReadEnded]:
        """Yield queued reads of memories that failed."""
        failed = [read for read in self._waiting if read.memory.failed]
        for read in failed:
            self._waiting.remove(read)
            read.ended.problem = read.memory.failed
            yield read.ended

    def _post(self) -> None:
        """Start queued reads in FIFO order. Skip memories that already use their share of slots."""
        passed: deque[RemoteRead] = deque()
        while self._waiting and self._free:
            read = self._waiting.popleft()
            if read.memory.failed or self._held[read.memory] >= MOST_OF_ONE:
                passed.append(read)
                continue
            self._start(read)
        self._waiting.extendleft(reversed(passed))

    def _start(self, read: RemoteRead) -> None:
        memory = read.memory
        regions = memory.regions(read.ended.header.sources, read.sizes)
        assert regions is not None  # checked in `begin`
        slot = self._free[0]
        targets = [(place.ctypes.data, len(place)) for place in self._places(slot, read.sizes)]
        try:
            read.handle = self._agent.read(memory.offer.agent, regions, targets)
        except NixlError as error:
            self.disconnect(memory, f"reading from {memory.offer.agent} failed: {error}")
            self._waiting.append(read)  # `ended` fails it with all other reads of this memory
            return
        self._free.popleft()
        read.slot, read.until = slot, self._clock() + READ_S
        self._held[memory] += 1
        self._under_way.append(read)

    def _places(self, slot: int, sizes: Sequence[int]) -> list[np.typing.NDArray[np.uint8]]:
        """Return the memory of the blocks of a message in a slot."""
        stops = list(itertools.accumulate(sizes))
        return [self._slots[slot, stop - size : stop] for stop, size in zip(stops, sizes, strict=True)]


class NixlError(DiptychError):
    """NIXL is missing or reported an error. The message gives the reason."""


class ReadState(Enum):
    UNDER_WAY = auto()
    DONE = auto()
    FAILED = auto()


class NixlAgent:
    """NIXL agent. Thread-safe. NIXL's own thread transfers the bytes."""

    def __init__(self, worker_id: str) -> None:
        """Raises NixlError."""
        self._bindings = bindings = load_bindings()
        self.name = f"{worker_id}-{secrets.token_hex(16)}"  # random, so that no other process can claim the name
        config = bindings.nixlAgentConfig()
        config.useProgThread, config.useListenThread = True, False
        config.pthrDelay = PROGRESS_US
        config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT  # shared by a decode worker's sender and receiver
        try:
            self._agent = bindings.nixlAgent(self.name, config)
            self._backend = self._agent.createBackend("UCX", {})
        except Exception as error:  # the bindings' errors have no common base class
            raise NixlError(f"NIXL cannot use UCX: {error}") from error
        self._kept: list[object] = []  # set last, so that it is freed after the agent

    def keep(self, memory: object) -> None:
        """Keep this memory until the agent has ended, because reads may still write to it."""
        self._kept.append(memory)

    def register(self, region: Region) -> Any:
        """Register memory with NIXL. Pass the result to `unregister`. Raises NixlError."""
        registered = self._bindings.nixlRegDList(self._bindings.DRAM_SEG, [(*region, 0, "")])
        try:
            self._agent.registerMem(registered, [self._backend])
        except Exception as error:
            raise NixlError(f"NIXL cannot register {region[1]:,} bytes: {error}") from error
        return registered

    def unregister(self, registered: Any) -> None:
        self._agent.deregisterMem(registered, [self._backend])

    def metadata(self, registered: Any) -> bytes:
        """Return the metadata that another agent needs to read this memory, and no other."""
        return bytes(self._agent.getLocalPartialMD(registered, True, [self._backend]))

    def connect(self, peer: str, metadata: bytes) -> None:
        """Load the metadata of `peer`. Raises NixlError."""
        try:
            found = self._agent.loadRemoteMD(metadata)
        except Exception as error:
            self.disconnect(peer)  # NIXL keeps what it parsed before the error
            raise NixlError(f"NIXL cannot reach {peer}: {error}") from error
        if (name := found.decode() if isinstance(found, bytes) else str(found)) != peer:
            self.disconnect(name)
            raise NixlError(f"NIXL's metadata is for {name}, not for {peer}")

    def disconnect(self, peer: str) -> None:
        """Disconnect from a peer. Its active reads fail."""
        try:
            self._agent.invalidateRemoteMD(peer)
        except Exception:  # not connected
            return

    def read(self, peer: str, sources: Sequence[Region], targets: Sequence[Region]) -> Any:
        """Start copying each of `peer`'s `sources` to the target of the same index. Raises NixlError."""
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
        except Exception:  # the peer has died or was disconnected
            return ReadState.FAILED
        if status == self._bindings.NIXL_IN_PROG:
            return ReadState.UNDER_WAY
        return ReadState.DONE if status == self._bindings.NIXL_SUCCESS else ReadState.FAILED

    def forget(self, handle: Any) -> None:
        """Abandon a read. It may still write, until its peer is disconnected and even later."""
        try:
            self._agent.releaseXferReq(handle)
        except Exception:  # it cannot be cancelled; NIXL frees it with the agent
            return


def load_bindings() -> ModuleType:
    """Import NIXL's bindings. Raises NixlError."""
    try:
        return import_module("nixl._bindings")
    except (ImportError, OSError) as error:
        raise NixlError(f"cannot load NIXL ({install_command('nixl')}): {error}") from error
