"""KV that one GPU copies out of another's memory: its rate between two processes, and what the death of one leaves.

With one GPU both processes have it; the calls are the same.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch
import zmq

from benchmarks.gpu.block_path import BlockPath, Events, Receivers, Shape, grant_all
from benchmarks.gpu.shape import GPUShape
from common.engine.kv.cache import KVCache
from common.engine.kv.copy_stream import CopyStream
from common.engine.kv.staging import StagedIncoming, StagedOutgoing
from common.engine.transfer.frames import blocks_per_message
from common.engine.transfer.receiver import KVListener, KVReceiver
from common.engine.transfer.transports.cuda_ipc import DeviceBlocks, DeviceReads, DeviceSums
from common.engine.transfer.transports.tcp import Frames
from common.errors import DiptychError

ROUNDS = 5
KILL_S, END_S = 0.3, 1.0
"""Copies run for END_S; their owner is killed after KILL_S."""
OWNED = 1.25
"""What a killed owner's blocks are full of."""

Prepare = Callable[[], None]


def ready() -> None:
    """Nothing to prepare: a GPU's driver is there."""


def ipc_rows(shape: GPUShape, device: torch.device, prepare: Prepare = ready) -> Iterator[dict[str, Any]]:
    """GB/s, and whether copies go on when the owner of the memory is killed. `prepare` runs first in each process.

    Raises RuntimeError when a transfer fails, DiptychError when the driver refuses.
    """
    kv = _cache(shape, device, export=True)
    kv.tensor.normal_()
    _wait(device)
    with Receivers() as processes:
        address = processes.start(_receive, shape, str(device), prepare)
        yield {"path": "KV, from GPU to GPU by CUDA IPC", "gb_per_s": _rate(kv, address), "ipc": True}
        yield {"path": "copies out of a killed owner", **_outlived(shape, device, processes, prepare)}
    assert kv.exported is not None
    kv.exported.close()


def _rate(kv: KVCache, address: str) -> float:
    frames = Frames(StagedOutgoing(kv, CopyStream(kv.device)).view)
    shape = Shape(kv.block_bytes, kv.num_blocks)
    path = BlockPath(address, shape, frames, DeviceBlocks(frames, kv))
    try:
        return round(shape.num_bytes / min(path.run() for _ in range(ROUNDS)) / 1e9, 3)
    finally:
        path.close()


def _receive(pipe: Connection, shape: GPUShape, device: str, prepare: Prepare) -> None:
    """Body of the receiving process: grants every announcement, into its own cache on the device."""
    prepare()
    kv = _cache(shape, torch.device(device))
    blocks = StagedIncoming(kv, CopyStream(kv.device)).reserve(blocks_per_message(kv.block_bytes))
    events: Events = SimpleQueue()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener = KVListener(context, "127.0.0.1", 0)
    receiver = KVReceiver(context, listener, blocks, events.put, transports=[DeviceReads(kv)])
    grant_all(pipe, receiver, events)


def _own(pipe: Connection, shape: GPUShape, device: str, prepare: Prepare) -> None:
    """Body of the process that is killed: it offers a cache, and waits."""
    prepare()
    kv = _cache(shape, torch.device(device), export=True)
    kv.tensor.fill_(OWNED)
    _wait(kv.device)
    assert kv.exported is not None
    pipe.send(kv.exported.offer)
    threading.Event().wait()


def _outlived(shape: GPUShape, device: torch.device, processes: Receivers, prepare: Prepare) -> dict[str, Any]:
    """Copies of all blocks, again and again, until some time behind the owner's death: how many rounds, and how many
    blocks were others than they were.
    """
    offer = processes.start(_own, shape, str(device), prepare)
    kv = _cache(shape, device)
    kv.tensor.fill_(OWNED)
    _wait(device)
    memory = DeviceReads(kv).accept(offer)
    (expected,) = DeviceSums(kv, CopyStream(device)).of([0])
    killing = threading.Timer(KILL_S, os.kill, (processes.last_pid, signal.SIGKILL))
    rounds = wrong = 0
    problem, until = "", time.monotonic() + END_S
    killing.start()
    try:
        while time.monotonic() < until:
            kv.tensor.zero_()
            _wait(device)
            found = [sum_ for index in range(kv.num_blocks) for sum_ in memory.reached.copy([(index, index)])]
            wrong += sum(one != expected for one in found)
            rounds += 1
    except (DiptychError, RuntimeError) as error:
        problem = f"{type(error).__name__}: {error}"
    killing.join()
    memory.close()
    return {"rounds": rounds, "wrong": wrong, "problem": problem, "survived": not (wrong or problem)}


def _cache(shape: GPUShape, device: torch.device, *, export: bool = False) -> KVCache:
    return KVCache(shape.config, 2 * shape.moved_blocks, shape.block_size, shape.dtype, device, export=export)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # copies run on streams of their own
