"""Collective operations of a worker's ranks through torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from common.engine.models import padded
from common.errors import RankLost
from common.model_files.architecture import Shard

COLLECTIVE_S = 60.0
"""Timeout of a collective, in seconds. Ranks normally reach it within a fraction of a step."""
NCCL_LATER_S = 30.0
"""Extra timeout of NCCL's watchdog, which aborts the process. The deadline of rank 0 expires first, with a reason."""
GROUP_END_S = 5.0
"""Maximum time, in seconds, to destroy a group. It waits for collectives of other threads."""
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


class RankGroup:
    """Implementation of `Collectives`. A process is in one group, and one thread at a time may use it."""

    def __init__(self, shard: Shard, rendezvous: str, device: torch.device) -> None:
        """Wait for all ranks at the same file `rendezvous`. Raises RankLost."""
        self._shard, self._device = shard, device
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, LOOPBACK)
        self._backend = backend = "nccl" if device.type == "cuda" else "gloo"
        options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
        deadline = timedelta(seconds=COLLECTIVE_S + (NCCL_LATER_S if backend == "nccl" else 0.0))

        def meet() -> None:
            store = FileStore(rendezvous, shard.size)
            dist.init_process_group(
                backend, store=store, rank=shard.rank, world_size=shard.size, timeout=deadline, **options
            )

        self._run(meet)

    def add_up(self, part: Tensor) -> Tensor:
        if self._shard.size == 2:  # the sum of two numbers does not depend on their order
            self._run(lambda: dist.all_reduce(part))
            return part
        parts = [torch.empty_like(part) for _ in range(self._shard.size)]
        self._run(lambda: dist.all_gather(parts, part))
        total = parts[0].to(torch.promote_types(part.dtype, torch.float32))
        for other in parts[1:]:
            total += other
        return total.to(part.dtype)

    def join(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        if not part.numel():
            # A barrier would block the host until the device has finished all earlier steps.
            self._run(lambda: dist.all_reduce(part.new_zeros(1)))
            return part.new_empty(0, sum(widths))
        own = padded(part, max(widths)).contiguous()
        if self._shard.rank:
            self._run(lambda: dist.gather(own, dst=0))
            return part
        parts = [torch.empty_like(own) for _ in widths]
        self._run(lambda: dist.gather(own, parts))
        return torch.cat([one[:, :width] for one, width in zip(parts, widths, strict=True)], dim=1)

    def spread(self, numbers: Tensor) -> None:
        """Broadcast `numbers` of rank 0 to all ranks, in place."""
        self._run(lambda: dist.broadcast(numbers, src=0))

    def least(self, number: int) -> int:
        """Return the minimum of the numbers of all ranks. Raises RankLost."""
        numbers = torch.tensor([number], device=self._device)
        self._run(lambda: dist.all_reduce(numbers, op=dist.ReduceOp.MIN))
        return int(numbers.item())

    def close(self) -> None:
        """Leave the group. A collective that still waits for a rank is abandoned until the process exits.

        On GPUs, does nothing: destroying a communicator waits for all graphs with its collectives, which the runner
        keeps (pytorch 115388), and for ranks that may be gone.
        """
        if self._backend == "gloo":
            leaving = threading.Thread(target=dist.destroy_process_group, name="leave-group", daemon=True)
            leaving.start()
            leaving.join(GROUP_END_S)

    @staticmethod
    def _run(collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise RankLost(f"a collective failed: {str(error).splitlines()[0]}") from error
