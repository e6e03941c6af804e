"""Registry of KV transports, by the value of the setting `kv_transport`."""

from __future__ import annotations

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


def new_transport(kv_transport: str, worker_id: str, *, device_index: int = 0) -> Transport:
    """Create the transport of this setting. Raises ConfigError if its requirements are not met."""
    return TRANSPORTS[kv_transport](worker_id, is_required=kv_transport == "shm", device_index=device_index)
