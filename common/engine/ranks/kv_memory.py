"""Access of rank 0 to the KV memory of other ranks: a memory file of a CPU rank, the CUDA handle of a GPU rank."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import torch

from common.engine.kv import KVCache, ShardedCache
from common.engine.ranks.channel import Channel

TIMEOUT_S = 30.0


def share_kv_memory(kv: KVCache, channel: Channel) -> None:
    """Share the memory of `kv` with rank 0. It must stay allocated. Raises RankLost."""
    if kv.shared is not None:
        channel.send_descriptor(kv.shared.offer.fd, TIMEOUT_S)
    else:
        handle = kv.tensor.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        channel.send(msgspec.msgpack.encode(handle), TIMEOUT_S)


def map_kv_memory(kv: ShardedCache, channel: Channel) -> None:
    """Map the memory of the next rank of `kv` on rank 0. Raises ModelError, OSError or RankLost."""
    if kv.device.type == "cuda":
        handle: list[Any] = msgspec.msgpack.decode(channel.receive(TIMEOUT_S))  # the first element is the device number
        storage = torch.UntypedStorage._new_shared_cuda(*handle)
        part = torch.empty(0, dtype=kv.dtype, device=f"cuda:{handle[0]}").set_(storage)
        kv.attach(part.view(kv.tensor.shape))
        return
    descriptor = channel.receive_descriptor(TIMEOUT_S)
    try:
        kv.attach_file(descriptor)
    finally:
        os.close(descriptor)
