"""How rank 0 reaches the KV memory of other ranks of its host: a memory file on a CPU, CUDA's handles on GPUs."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import torch

from common.engine.kv import KVCache, ShardedCache
from common.engine.ranks.channel import Channel

TIMEOUT_S = 30.0


def lend(kv: KVCache, channel: Channel) -> None:
    """Gives rank 0 the memory of `kv`, which must stay. Raises RankLost."""
    if kv.shared is not None:
        channel.send_descriptor(kv.shared.offer.fd, TIMEOUT_S)
    else:
        handle = kv.tensor.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        channel.send(msgspec.msgpack.encode(handle), TIMEOUT_S)


def borrow(kv: ShardedCache, channel: Channel) -> None:
    """Rank 0's side, for the next rank of `kv`. Raises ModelError, OSError or RankLost."""
    if kv.device.type == "cuda":
        handle: list[Any] = msgspec.msgpack.decode(channel.receive(TIMEOUT_S))  # the device's number comes first
        storage = torch.UntypedStorage._new_shared_cuda(*handle)
        part = torch.empty(0, dtype=kv.dtype, device=f"cuda:{handle[0]}").set_(storage)
        kv.attach(part.view(kv.tensor.shape))
        return
    descriptor = channel.receive_descriptor(TIMEOUT_S)
    try:
        kv.attach_file(descriptor)
    finally:
        os.close(descriptor)
