"""Registry of KV transports, by the value of the setting `kv_transport`."""

from __future__ import annotations

from common.config import WorkerConfig
from common.engine.transfer.transports.cuda_ipc import CudaIpcTransport
from common.engine.transfer.transports.interface import Transport
from common.engine.transfer.transports.nixl import NixlTransport
from common.engine.transfer.transports.shm import SharedMemoryTransport
from common.engine.transfer.transports.tcp import TcpTransport

TRANSPORTS: dict[str, type[Transport]] = {
    "auto": SharedMemoryTransport,
    "tcp": TcpTransport,
    "shm": SharedMemoryTransport,
    "nixl": NixlTransport,
    "cuda-ipc": CudaIpcTransport,
}


def new_transport(config: WorkerConfig, worker_id: str) -> Transport:
    """Create the configured transport. Raises ConfigError if its requirements are not met."""
    return TRANSPORTS[config.kv_transport](config, worker_id)
