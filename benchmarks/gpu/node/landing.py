"""KV transfers that land in a cache while recorded steps over other blocks of it are replayed: nothing may change.

They come in frames, through a ring in shared memory and, where the driver exports memory, from GPU to GPU, in turns.
The tokens of many short generations are compared with those of the same ones without transfers, and each block that
landed with what was sent, to the byte.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import torch
import zmq

from benchmarks.gpu.block_path import BlockPath, Events, Shape, grant_all
from benchmarks.gpu.engine import recorded
from benchmarks.gpu.model import random_model
from benchmarks.gpu.node.verdict import Verdict
from benchmarks.gpu.shape import GPUShape
from common.engine.kv.block_ring import ring_for
from common.engine.kv.cache import KVCache
from common.engine.kv.copy_stream import CopyStream
from common.engine.kv.cuda_driver import DriverError, driver
from common.engine.kv.device_memory import KVDevice
from common.engine.kv.staging import StagedIncoming, StagedOutgoing
from common.engine.models.batch import SequenceChunk
from common.engine.run.graph_runner import GraphRunner
from common.engine.run.runner import ModelRunner
from common.engine.run.seats import FROM_HOST
from common.engine.run.step_launchers import GraphStep, StepLauncher
from common.engine.sampling.sampler import Sampler
from common.engine.transfer.frames import blocks_in_queues, blocks_per_message
from common.engine.transfer.receiver import KVListener, KVReceiver
from common.engine.transfer.transports.cuda_ipc import DeviceBlocks, DeviceReads, ImportedMemory
from common.engine.transfer.transports.interface import DeviceCopySource, IncomingEnd, OutgoingEnd
from common.engine.transfer.transports.shm import RingSlotSource, SharedBlocks, SharedReads
from common.engine.transfer.transports.tcp import Frames

END_S = 90.0
"""For the last transfer."""


class LandingBlocks:
    """Sends blocks again and again, with other numbers each time, into `kv` from block `first` on."""

    def __init__(self, shape: GPUShape, kv: KVCache, first: int, count: int) -> None:
        self._kv, self._first, self._count = kv, first, count
        exports = self._exports(kv.device)
        self._source = KVCache(shape.config, count, shape.block_size, shape.dtype, kv.device, export=exports)
        incoming = StagedIncoming(kv, CopyStream(kv.device)).reserve(blocks_per_message(kv.block_bytes))
        events = Events()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        transports: list[IncomingEnd[Any]] = [
            SharedReads(lambda memory: _Shifted(RingSlotSource(incoming, memory), first))
        ]
        if exports:
            transports.append(_ShiftedReads(kv, first))
        self._receiver = KVReceiver(
            self._context,
            KVListener(self._context, "127.0.0.1", 0),
            _ShiftedBlocks(incoming, first),
            events.put,
            transports=transports,
        )
        address: SimpleQueue[str] = SimpleQueue()
        granting = threading.Thread(target=grant_all, args=(_Mailbox(address), self._receiver, events), daemon=True)
        granting.start()
        whereto = address.get(timeout=END_S)
        self._paths = [self._path(whereto), self._path(whereto, through="ring")]
        if exports:
            self._paths.append(self._path(whereto, through="device"))
        self.num_paths = len(self._paths)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="landing")
        self.num_transfers = self.num_wrong = 0
        self.failure = ""

    @staticmethod
    def _exports(device: torch.device) -> bool:
        try:
            driver().check(device.index or 0)
        except DriverError:
            return False
        return True

    def _path(self, address: str, *, through: str = "") -> BlockPath:
        outgoing = StagedOutgoing(self._source, CopyStream(self._kv.device)).reserve(
            blocks_in_queues(self._kv.block_bytes)
        )
        frames = Frames(outgoing.view)
        end: OutgoingEnd | None = None
        if through == "ring":
            end = SharedBlocks(frames, ring=ring_for(outgoing, self._count))
        elif through == "device":
            end = DeviceBlocks(frames, self._source)
        return BlockPath(address, Shape(self._kv.block_bytes, self._count), frames, end)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(END_S)
        for path in self._paths:
            path.close()
        self._receiver.stop()
        self._context.destroy(linger=0)
        if self._source.exported is not None:
            self._source.exported.close()

    def _run(self) -> None:
        random = torch.Generator(self._kv.device).manual_seed(1)
        landed = self._kv.tensor[self._first : self._first + self._count].view(torch.uint8)
        try:
            while not self._stop.is_set():
                self._source.tensor.normal_(generator=random)
                if self._kv.device.type == "cuda":
                    torch.cuda.synchronize(self._kv.device)  # copies run on streams of their own
                self._paths[self.num_transfers % len(self._paths)].run()
                self.num_transfers += 1
                self.num_wrong += int((landed != self._source.tensor.view(torch.uint8)).sum())
        except Exception as error:  # told with the verdict
            self.failure = f"{type(error).__name__}: {error}"


class _ShiftedBlocks:
    """Implements `IncomingBlocks`: the blocks from `first` on."""

    def __init__(self, blocks: StagedIncoming, first: int) -> None:
        self._blocks, self._first = blocks, first

    def num_bytes(self, index: int) -> int:
        return self._blocks.num_bytes(index)

    def view(self, index: int) -> memoryview:
        return self._blocks.view(self._first + index)

    def commit(self, indices: Sequence[int]) -> None:
        self._blocks.commit([self._first + index for index in indices])


class _ShiftedReads(DeviceReads):
    """Copies into the blocks from `first` on."""

    def __init__(self, kv: KVCache, first: int) -> None:
        super().__init__(kv)
        self._first = first

    def accept(self, offer: KVDevice) -> ImportedMemory:
        memory = super().accept(offer)
        memory.reached = _Shifted(memory.reached, self._first)
        return memory


class _Shifted:
    """Implements `DeviceCopySource`: copies into the blocks from `first` on."""

    def __init__(self, reached: DeviceCopySource, first: int) -> None:
        self._reached, self._first, self.block_bytes = reached, first, reached.block_bytes

    def copy(self, copies: Iterable[tuple[int, int]]) -> Iterator[int | None]:
        return self._reached.copy((place, self._first + index) for place, index in copies)

    def close(self) -> None:
        self._reached.close()


class _Mailbox:
    """What `grant_all` sends its address to."""

    def __init__(self, queue: SimpleQueue[str]) -> None:
        self.send = queue.put


def measure_landing(shape: GPUShape, device: torch.device, seconds: float) -> dict[str, Any]:
    """Generations for `seconds` with transfers beside them: how many replays, transfers, other tokens, other bytes."""
    model = random_model(shape, device)
    few, each = max(shape.decode_batches), 2
    with torch.inference_mode(False):  # as a worker's: the receiver's thread writes it too
        kv = KVCache(shape.config, few * each + shape.moved_blocks, shape.block_size, shape.dtype, device)
        landing = LandingBlocks(shape, kv, few * each, shape.moved_blocks)
    graphs, plain = recorded(model, kv, shape), ModelRunner(model, kv)
    generate = _Generations(shape, graphs, plain, few)
    expected = generate.run()
    rounds = different = 0
    began = time.monotonic()
    landing.start()
    try:
        while time.monotonic() - began < seconds or not (landing.num_transfers >= landing.num_paths or landing.failure):
            found = generate.run()
            rounds += 1
            different += sum(one != other for one, other in zip(found, expected, strict=True))
    finally:
        took = time.monotonic() - began
        landing.stop()
    return {
        "seconds": round(took, 1),
        "replays": rounds * generate.num_steps,
        "transfers": landing.num_transfers,
        "paths": landing.num_paths,
        "gb_per_s": round(landing.num_transfers * shape.moved_blocks * kv.block_bytes / took / 1e9, 3),
        "tokens": rounds * len(expected),
        "other_tokens": different,
        "other_bytes": landing.num_wrong,
        "failure": landing.failure,
    }


class _Generations:
    """The same greedy generations each time: `count` sequences, each step fed by the one before on the device."""

    def __init__(self, shape: GPUShape, graphs: GraphRunner, plain: ModelRunner, count: int) -> None:
        self._plain, self._count, self._start = plain, count, shape.block_size - 2
        self.num_steps = shape.block_size // 2
        self._launcher = StepLauncher(graphs, Sampler(shape.vocab_size))
        self._prompts = [[(11 * i + j) % shape.vocab_size for j in range(self._start)] for i in range(count)]

    def run(self) -> list[int]:
        """All tokens, step by step."""
        prompts = [SequenceChunk(tokens, 0, (2 * i, 2 * i + 1), sample=False) for i, tokens in enumerate(self._prompts)]
        self._plain.forward(prompts)
        sources: Sequence[int] = [FROM_HOST] * self._count
        before: GraphStep | None = None
        tokens: list[int] = []
        for step in range(self.num_steps):
            chunks = [SequenceChunk((i % 7,), self._start + step, (2 * i, 2 * i + 1)) for i in range(self._count)]
            launched = self._launcher.launch(chunks, sources)
            launched.sample({})
            if before is not None:
                tokens += [token.token_id for token in before.read()]
            before, sources = launched, range(self._count)
        assert before is not None  # there is at least one step
        return [*tokens, *(token.token_id for token in before.read())]


def of_landing(row: dict[str, Any]) -> Verdict:
    found = (
        f"{row['seconds']:g} s, {row['replays']:,} replays, {row['transfers']:,} transfers, {row['other_tokens']} of "
        f"{row['tokens']:,} tokens and {row['other_bytes']} bytes are others {row['failure']}".rstrip()
    )
    ok = not (row["other_tokens"] or row["other_bytes"] or row["failure"]) and row["transfers"] >= row["paths"]
    return Verdict("landing", "transfers during replays", ok, found, "none may be")
