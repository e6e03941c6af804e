"""NIXL: the receiver reads the sender's cache, or its ring of places, from any host, over UCX.

A read that is given up may still write when its peer wakes (NIXL cannot call it back), so no read writes to the cache:
the blocks of a message land in a slot of memory that belongs to nothing else, and are copied and verified from there
once all are here. The slot of a read that was given up is put aside for a while; what comes later still spoils no block
unnoticed, because a block counts by its checksum in the cache.

    waiting ──a slot is free──> under way ──> landed, or failed with all others of its memory

This uses NIXL's bindings rather than its `nixl_agent`, whose progress thread never sleeps: with a delay that thread
waits for the network, and takes 0.01 of a core where nothing is read (docs/decisions/0070-nixl.md).
"""

from __future__ import annotations

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

from common.config import WorkerConfig
from common.engine.kv import BlocksInPlace
from common.engine.transfer.frames import blocks_per_message
from common.engine.transfer.transports.interface import (
    Copied,
    IncomingEnd,
    ReadAheadMemory,
    ReadEnded,
    Transport,
    copy_on_host,
)
from common.engine.transfer.transports.numbered import NumberedBlocks
from common.engine.transfer.transports.shm import shared_ring
from common.errors import ConfigError, DiptychError
from common.wire.messages import KVBlocks, KVOffer

if TYPE_CHECKING:
    from common.engine.kv import BlockRing, IncomingBlocks, KVCache, OutgoingBlocks
    from common.engine.transfer.receiver import IncomingTransfer
    from common.engine.transfer.transports.tcp import Frames

NAME = "nixl"
MAX_REMOTE_BYTES = 32 * 1024
"""Of what NIXL must know to reach an agent: some hundred bytes for each network device of the host."""
NUM_SLOTS = 16
"""Messages that are read at once, about 2 MiB each: enough to fill a network while the thread copies others."""
MOST_OF_ONE = NUM_SLOTS // 2
"""Slots that the reads of one memory may hold, so that a peer that does not answer leaves room to the others."""
MAX_WAITING = 16_384
"""Messages that may wait for a slot: more than the blocks of any prompt make."""
READ_S = 10.0
"""How long a read may take: 2 MiB at 0.2 MB/s."""
LATE_S = 20.0
"""How long the slot of a read that was given up is put aside: less than until its memory is tried again (`RETRY_S`), so
that one memory that fails again and again never takes the other half of the slots."""
LOOK_MS = 1
"""How often reads under way are looked at: NIXL has no descriptor to wait for."""
PROGRESS_US = 1000
"""How long NIXL's thread may sleep although something came that wakes it late; NIXL rounds it up to milliseconds."""

Region = tuple[int, int]  # address and bytes


class KVRemote(msgspec.Struct, frozen=True, array_like=True):
    """Where NIXL reads a worker's blocks, or the places that it copies them to (`is_ring`), from any host.

    `metadata` is NIXL's own: how to connect to `agent`, and the keys of the `num_bytes` from `address` on.
    """

    agent: Annotated[str, Meta(min_length=1, max_length=256)]
    metadata: Annotated[bytes, Meta(min_length=1, max_length=MAX_REMOTE_BYTES)]
    address: Annotated[int, Meta(ge=1, le=2**62)]
    num_bytes: Annotated[int, Meta(ge=1, le=2**50)]
    is_ring: bool = False


class NixlTransport(Transport):
    """The setting `nixl`. Where one side has no NIXL, blocks travel as frames."""

    name = NAME

    def __init__(self, config: WorkerConfig, worker_id: str) -> None:
        super().__init__(config, worker_id)
        try:
            self._agent = NixlAgent(worker_id)
        except NixlError as error:
            raise _refused(error) from error

    def outgoing(self, kv: KVCache, blocks: OutgoingBlocks, frames: Frames) -> RemoteBlocks | None:
        ring = shared_ring(blocks, kv.num_blocks)
        if ring is None and not isinstance(blocks, BlocksInPlace):
            return None
        region = (kv.tensor.data_ptr(), kv.tensor.nbytes) if ring is None else ring.region
        try:
            return RemoteBlocks(frames, self._agent, region, ring)
        except NixlError as error:
            raise _refused(error) from error

    def incoming(self, kv: KVCache, blocks: IncomingBlocks) -> RemoteReads:
        try:
            return RemoteReads(self._agent, kv.wire_bytes)
        except NixlError as error:
            raise _refused(error) from error


def _refused(error: NixlError) -> ConfigError:
    return ConfigError("kv_transport", "nixl", f"auto, tcp or shm: {error}")


class RemoteBlocks(NumberedBlocks):
    """Offers a `region` that holds the cache or, with a `ring`, its places."""

    transport = NAME

    def __init__(self, frames: Frames, agent: NixlAgent, region: Region, ring: BlockRing | None = None) -> None:
        """The memory must outlast this. Raises NixlError."""
        super().__init__(frames, ring)
        self._offered = OfferedMemory(agent, region, is_ring=ring is not None)
        self._offer = KVOffer.of(NAME, self._offered.offer)

    @property
    def offer(self) -> KVOffer:
        return self._offer

    @property
    def in_words(self) -> str:
        ring = self.ring
        return f"through {ring.num_places} places that are read with NIXL" if ring is not None else "by reads with NIXL"

    def close(self) -> None:
        self._offered.close()
        super().close()


class OfferedMemory:
    """Blocks of this worker, or places for them, that others may read until `close`."""

    def __init__(self, agent: NixlAgent, region: Region, *, is_ring: bool) -> None:
        """The memory must outlast this. Raises NixlError."""
        self._agent, self._registered = agent, agent.register(region)
        metadata = agent.metadata(self._registered)
        if len(metadata) > MAX_REMOTE_BYTES:
            agent.unregister(self._registered)
            raise NixlError(
                f"NIXL needs {len(metadata):,} bytes to tell of this host's networks, more than {MAX_REMOTE_BYTES:,}: "
                "name those for KV with UCX_NET_DEVICES"
            )
        self.offer = KVRemote(agent.name, metadata, *region, is_ring)

    def close(self) -> None:
        self._agent.unregister(self._registered)


class RemoteMemory(ReadAheadMemory):
    """The reader's side of an offer."""

    transport = NAME

    def __init__(self, offer: KVRemote, reads: RemoteReads) -> None:
        self.offer, self._reads = offer, reads

    @property
    def is_ring(self) -> bool:
        return self.offer.is_ring

    @property
    def in_words(self) -> str:
        return "is read with NIXL"

    def regions(self, sources: Sequence[int], block_bytes: int) -> list[Region] | None:
        """Where the blocks of these numbers are; None when one is beyond the memory."""
        offer = self.offer
        if any((source + 1) * block_bytes > offer.num_bytes for source in sources):
            return None
        return [(offer.address + source * block_bytes, block_bytes) for source in sources]

    def begin(self, peer: bytes, header: KVBlocks) -> str:
        return self._reads.begin(peer, header, self)

    def close(self) -> None:
        self._reads.disconnect(self)


@dataclass(frozen=True, slots=True)
class LandedBlocks:
    """The blocks of one message, read into memory of this worker that is not the cache."""

    blocks: dict[int, memoryview]
    """By their numbers in the sender's memory."""

    def read(self, source: int, target: memoryview) -> bool:
        """Copy a block to `target`, as large as it is. False: no such block."""
        if (block := self.blocks.get(source)) is None or len(block) != len(target):
            return False
        target[:] = block
        return True

    def copy(self, header: KVBlocks, transfer: IncomingTransfer, into: IncomingBlocks) -> Copied:
        return copy_on_host(self.read, header, transfer, into)


@dataclass(slots=True, eq=False)
class RemoteRead:
    """A read of the blocks that one message names, into a slot. `ended` is its result for the receiver."""

    ended: ReadEnded
    memory: RemoteMemory
    slot: int = -1
    handle: Any = None
    until: float = 0.0


class RemoteReads(IncomingEnd[KVRemote]):
    """Reads of one receiver out of the memories of other workers, several at once."""

    transport = NAME
    details = KVRemote

    def __init__(self, agent: NixlAgent, block_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises NixlError."""
        self._agent, self._clock, self._block_bytes = agent, clock, block_bytes
        self._most_blocks = blocks_per_message(block_bytes)
        self._slots = np.zeros((NUM_SLOTS, self._most_blocks, block_bytes), np.uint8)
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

    def disconnect(self, memory: RemoteMemory, why: str = "its worker offers another memory") -> None:
        """Nothing is read from it any more; reads under way fail."""
        if not memory.failed:
            memory.failed = why
            self._agent.disconnect(memory.offer.agent)

    @property
    def poll_ms(self) -> int | None:
        return LOOK_MS if self._under_way or self._waiting else None

    def begin(self, peer: bytes, header: KVBlocks, memory: RemoteMemory) -> str:
        """Read the blocks that a message names, as soon as a slot is free. What is wrong with them, or ""."""
        if memory.failed:
            return memory.failed
        if (count := len(header.sources)) > self._most_blocks:
            return f"a message names {count} blocks, more than {self._most_blocks}"
        if memory.regions(header.sources, self._block_bytes) is None:
            return f"a message names blocks beyond the {memory.offer.num_bytes:,} bytes that were offered"
        if len(self._waiting) >= MAX_WAITING:
            return f"{MAX_WAITING} messages wait to be read already"
        self._waiting.append(RemoteRead(ReadEnded(peer, header), memory))
        self._post()
        return ""

    def ended(self) -> Iterator[ReadEnded]:
        """The landed blocks of a read are there until the next one is requested."""
        now = self._clock()
        for read in list(self._under_way):
            state = ReadState.FAILED if read.memory.failed else self._agent.state(read.handle)
            if state is ReadState.UNDER_WAY and now < read.until:
                continue
            self._under_way.remove(read)
            self._held[read.memory] -= 1
            self._agent.forget(read.handle)
            if state is ReadState.DONE:
                numbered = zip(read.ended.header.sources, self._slots[read.slot], strict=False)
                read.ended.landed = LandedBlocks({source: block.data for source, block in numbered})
                yield read.ended
                self._free.append(read.slot)
            else:
                late = f"no answer for {READ_S:g} s" if state is ReadState.UNDER_WAY else "NIXL reports an error"
                self.disconnect(read.memory, f"{read.memory.offer.agent} cannot be read: {late}")
                self._late.append((now + LATE_S, read.slot))
                read.ended.problem = read.memory.failed
                yield read.ended
        yield from self._failed_waiting()
        while self._late and self._late[0][0] <= now:
            self._free.append(self._late.popleft()[1])
        self._post()

    def close(self) -> None:
        """The thread has ended. Reads that were given up may still write to the slots."""
        for read in self._under_way:
            self._agent.forget(read.handle)
        if self._under_way or self._late:
            self._agent.keep(self._slots)
        else:
            self._agent.unregister(self._registered)

    def _failed_waiting(self) -> Iterator[ReadEnded]:
        """The waiting reads of memories that failed."""
        failed = [read for read in self._waiting if read.memory.failed]
        for read in failed:
            self._waiting.remove(read)
            read.ended.problem = read.memory.failed
            yield read.ended

    def _post(self) -> None:
        """Begin waiting reads in their order, except those of a memory that holds its share of slots."""
        passed: deque[RemoteRead] = deque()
        while self._waiting and self._free:
            read = self._waiting.popleft()
            if read.memory.failed or self._held[read.memory] >= MOST_OF_ONE:
                passed.append(read)
                continue
            self._start(read)
        self._waiting.extendleft(reversed(passed))

    def _start(self, read: RemoteRead) -> None:
        memory, sources = read.memory, read.ended.header.sources
        regions = memory.regions(sources, self._block_bytes)
        assert regions is not None  # looked at in `begin`
        slot = self._free[0]
        targets = [(block.ctypes.data, self._block_bytes) for block in self._slots[slot][: len(sources)]]
        try:
            read.handle = self._agent.read(memory.offer.agent, regions, targets)
        except NixlError as error:
            self.disconnect(memory, f"{memory.offer.agent} cannot be read: {error}")
            self._waiting.append(read)  # for `ended`, with all others of this memory
            return
        self._free.popleft()
        read.slot, read.until = slot, self._clock() + READ_S
        self._held[memory] += 1
        self._under_way.append(read)


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
        raise NixlError(f"NIXL is not installed, or does not load (pip install nixl): {error}") from error
