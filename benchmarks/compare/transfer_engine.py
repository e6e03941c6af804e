"""GB/s of a transfer engine from one process to another over loopback. Runs in the engine's environment (with numpy).

The receiving process registers its memory and sends its address; the sender writes all blocks in one request,
repeatedly. A write ends when the receiver has seen the last byte of every block and reported it, because engines call a
write done when it has left, perhaps before it has arrived. The receiver compares all bytes. The first write of each
engine does not count.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_S = 120.0
ARRIVAL_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 1e-4
BYTE = 7


class Engine(ABC):
    """One side of a transfer. `buffer` is `num_blocks` blocks of `block_bytes`, registered with the engine."""

    def __init__(self, name: str, num_blocks: int, block_bytes: int, fill: int) -> None:
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self.buffer: Any = import_module("numpy").full((num_blocks, block_bytes), fill, "uint8")
        self.addresses = [int(self.buffer.ctypes.data) + index * block_bytes for index in range(num_blocks)]
        self.open(name)

    @abstractmethod
    def open(self, name: str) -> None:
        """Start the engine and register the buffer."""

    @abstractmethod
    def invitation(self) -> Any:
        """The address and keys that the other side needs to write here."""

    @abstractmethod
    def connect(self, invitation: Any) -> None:
        """Prepare writing to the side that invited."""

    @abstractmethod
    def write(self) -> None:
        """Write every block of this side over the same block of the other. May return before they arrive."""


class Mooncake(Engine):
    """Mooncake's transfer engine over TCP."""

    def open(self, name: str) -> None:
        self._engine = import_module("mooncake.engine").TransferEngine()
        _expect(self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0, "initialize")
        _expect(self._engine.register_memory(self.addresses[0], self.buffer.nbytes) == 0, "register_memory")

    def invitation(self) -> Any:
        return f"127.0.0.1:{self._engine.get_rpc_port()}", self.addresses

    def connect(self, invitation: Any) -> None:
        self._peer, self._targets = invitation

    def write(self) -> None:
        lengths = [self.block_bytes] * self.num_blocks
        done = self._engine.batch_transfer_sync_write(self._peer, self.addresses, self._targets, lengths)
        _expect(done == 0, "batch_transfer_sync_write")


class Nixl(Engine):
    """NIXL over UCX; UCX_TLS chooses TCP or shared memory."""

    def open(self, name: str) -> None:
        api = import_module("nixl._api")
        self._agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        whole = [(self.addresses[0], self.buffer.nbytes, 0, "")]
        _expect(self._agent.register_memory(self._agent.get_reg_descs(whole, "DRAM")) is not None, "register_memory")

    def invitation(self) -> Any:
        return self._agent.get_agent_metadata(), self.addresses

    def connect(self, invitation: Any) -> None:
        metadata, targets = invitation
        peer = self._agent.add_remote_agent(metadata)
        local, remote = (
            self._agent.get_xfer_descs([(address, self.block_bytes, 0) for address in side], "DRAM")
            for side in (self.addresses, targets)
        )
        name = peer.decode() if isinstance(peer, bytes) else peer
        self._transfer = self._agent.initialize_xfer("WRITE", local, remote, name)

    def write(self) -> None:
        state = self._agent.transfer(self._transfer)
        while state == "PROC":
            state = self._agent.check_xfer_state(self._transfer)
        _expect(state == "DONE", "transfer")


ENGINES: dict[str, type[Engine]] = {"mooncake": Mooncake, "nixl": Nixl}


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"{what} failed")


def _receive(pipe: Connection, what: str) -> Any:
    _expect(pipe.poll(TIMEOUT_S), what)
    return pipe.recv()


def receive(pipe: Connection, engine: str, num_blocks: int, block_bytes: int) -> None:
    """Body of the receiving process: sends its invitation; then, at each "expect", reports when the last byte of every
    block has arrived, and whether all bytes have."""
    side = ENGINES[engine]("receiver", num_blocks, block_bytes, 0)
    pipe.send(side.invitation())
    while pipe.recv() == "expect":
        deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
        while not (side.buffer[:, -1] == BYTE).all() and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_S)
        pipe.send("arrived")
        whole = bool((side.buffer == BYTE).all())
        side.buffer[:] = 0
        pipe.send(whole)


def measure(engine: str, num_blocks: int, block_bytes: int, repeats: int) -> list[float]:
    """GB/s of each counted write. Raises RuntimeError when one fails or other bytes arrive than were sent."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=receive, args=(theirs, engine, num_blocks, block_bytes), daemon=True)
    process.start()
    try:
        side = ENGINES[engine]("sender", num_blocks, block_bytes, BYTE)
        side.connect(_receive(ours, "the receiver's start"))
        rates = []
        for _ in range(repeats + 1):
            ours.send("expect")
            begin = time.perf_counter()
            side.write()
            _receive(ours, "the arrival")
            rates.append(side.buffer.nbytes / (time.perf_counter() - begin) / 1e9)
            _expect(_receive(ours, "the comparison"), "the comparison of the bytes")
        ours.send("end")
        return rates[1:]
    finally:
        process.terminate()
        process.join()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("transfer_engine", description=__doc__)
    parser.add_argument("--engine", choices=sorted(ENGINES), required=True, help="engine to measure")
    parser.add_argument("--num-blocks", type=int, default=256, help="blocks in a write")
    parser.add_argument("--block-bytes", type=int, default=2**20, help="bytes of a block")
    parser.add_argument("--repeats", type=int, default=5, help="counted writes")
    options = parser.parse_args(argv)
    rates = measure(options.engine, options.num_blocks, options.block_bytes, options.repeats)
    print(json.dumps({"gb_per_s": rates}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
