"""Reads of one receiver out of the memories of other hosts, several at once.

A read that is given up may still write when its peer wakes (NIXL cannot call it back), so no read writes to the cache:
the blocks of a message land in a slot of memory that belongs to nothing else, and are copied and verified from there
once all are here. The slot of a read that was given up is put aside for a while; what comes later still spoils no block
unnoticed, because a block counts by its checksum in the cache.

    waiting ──a slot is free──> under way ──> landed, or failed with all others of its memory
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.engine.transfer.frames import blocks_per_message
from common.engine.transfer.nixl_agent import NixlAgent, NixlError, ReadState
from common.engine.transfer.remote_memory import LandedBlocks, RemoteMemory
from common.wire.messages import KVBlocks, KVRemote

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


@dataclass(slots=True, eq=False)
class RemoteRead:
    """The blocks that one message names. `problem`: why they did not land, or ""."""

    peer: bytes
    header: KVBlocks
    memory: RemoteMemory
    slot: int = -1
    handle: Any = None
    until: float = 0.0
    landed: LandedBlocks | None = None
    problem: str = ""


class RemoteReads:
    """Used by one thread at a time: the engine's until the receiver's has started, then that alone."""

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

    def connect(self, offer: KVRemote) -> RemoteMemory:
        """Raises NixlError."""
        self._agent.connect(offer.agent, offer.metadata)
        return RemoteMemory(offer)

    def disconnect(self, memory: RemoteMemory, why: str = "its worker offers another memory") -> None:
        """Nothing is read from it any more; reads under way fail."""
        if not memory.failed:
            memory.failed = why
            self._agent.disconnect(memory.offer.agent)

    @property
    def poll_ms(self) -> int | None:
        """When to call `finished` again, or None: when something else happens."""
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
        self._waiting.append(RemoteRead(peer, header, memory))
        self._post()
        return ""

    def finished(self) -> Iterator[RemoteRead]:
        """Each read that ended. Its landed blocks are there until the next one is asked for."""
        now = self._clock()
        for read in list(self._under_way):
            state = ReadState.FAILED if read.memory.failed else self._agent.state(read.handle)
            if state is ReadState.UNDER_WAY and now < read.until:
                continue
            self._under_way.remove(read)
            self._held[read.memory] -= 1
            self._agent.forget(read.handle)
            if state is ReadState.DONE:
                numbered = zip(read.header.sources, self._slots[read.slot], strict=False)
                read.landed = LandedBlocks({source: block.data for source, block in numbered})
                yield read
                self._free.append(read.slot)
            else:
                late = f"no answer for {READ_S:g} s" if state is ReadState.UNDER_WAY else "NIXL reports an error"
                self.disconnect(read.memory, f"{read.memory.offer.agent} cannot be read: {late}")
                self._late.append((now + LATE_S, read.slot))
                read.problem = read.memory.failed
                yield read
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

    def _failed_waiting(self) -> Iterator[RemoteRead]:
        """The waiting reads of memories that failed."""
        failed = [read for read in self._waiting if read.memory.failed]
        for read in failed:
            self._waiting.remove(read)
            read.problem = read.memory.failed
            yield read

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
        memory, sources = read.memory, read.header.sources
        regions = memory.regions(sources, self._block_bytes)
        assert regions is not None  # looked at in `begin`
        slot = self._free[0]
        targets = [(block.ctypes.data, self._block_bytes) for block in self._slots[slot][: len(sources)]]
        try:
            read.handle = self._agent.read(memory.offer.agent, regions, targets)
        except NixlError as error:
            self.disconnect(memory, f"{memory.offer.agent} cannot be read: {error}")
            self._waiting.append(read)  # for `finished`, with all others of this memory
            return
        self._free.popleft()
        read.slot, read.until = slot, self._clock() + READ_S
        self._held[memory] += 1
        self._under_way.append(read)
