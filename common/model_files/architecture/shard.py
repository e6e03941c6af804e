"""Shards: the part of a model that a rank of a tensor parallel worker has. Pure; does not load torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from common.errors import ConfigError

if TYPE_CHECKING:
    from common.model_files.config import ModelConfig

MOST_RANKS = 64
"""Largest number of ranks that an error message suggests."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`."""

    rank: int
    size: int

    def part(self, total: int) -> range:
        """Return this rank's rows of `total`. Parts are contiguous, and their lengths differ by at most one."""
        return range(total * self.rank // self.size, total * (self.rank + 1) // self.size)

    def widths(self, total: int) -> list[int]:
        """Return the lengths of all ranks' parts."""
        return [len(Shard(rank, self.size).part(total)) for rank in range(self.size)]

    def kv_heads(self, total: int) -> range:
        """Return this rank's KV heads of `total`. With more ranks than heads, neighbouring ranks share one."""
        if total >= self.size:
            return self.part(total)
        head = self.rank * total // self.size
        return range(head, head + 1)

    def of(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration of this rank's layers. The vocabulary is not split."""
        experts = config.experts
        if experts is not None:
            inner, shared = len(self.part(experts.intermediate_size)), len(self.part(experts.shared_size))
            experts = replace(experts, intermediate_size=inner, shared_size=shared)
        return replace(
            config,
            num_heads=len(self.part(config.num_heads)),
            num_kv_heads=len(self.kv_heads(config.num_kv_heads)),
            intermediate_size=len(self.part(config.intermediate_size)),
            experts=experts,
        )


def kv_owners(total: int, size: int) -> list[range]:
    """Return for each rank the KV heads to read from it when joining blocks. Each head is read from one rank."""
    owners, first = [], 0
    for rank in range(size):
        heads = Shard(rank, size).kv_heads(total)
        owners.append(range(max(first, heads.start), heads.stop))
        first = heads.stop
    return owners


def allowed_sizes(config: ModelConfig) -> list[int]:
    """Return the numbers of ranks that a model can be split into."""
    return [size for size in range(1, MOST_RANKS + 1) if _divides(config, size)]


def check_size(config: ModelConfig, size: int) -> None:
    """Raise ConfigError if the model cannot be split into `size` ranks."""
    sizes = allowed_sizes(config)
    if size not in sizes:
        allowed = (
            f"{_in_words(sizes)} for this model: {config.num_heads} heads, {config.num_kv_heads} KV heads and MLP "
            f"widths {', '.join(map(str, _widths(config)))} must be divisible by the number of ranks"
        )
        raise ConfigError("tensor_parallel_size", size, allowed)


def _divides(config: ModelConfig, size: int) -> bool:
    kv_heads = config.num_kv_heads
    shares = kv_heads % size == 0 if kv_heads >= size else size % kv_heads == 0
    return shares and not any(count % size for count in (config.num_heads, *_widths(config)))


def _widths(config: ModelConfig) -> list[int]:
    """Return the widths of all MLPs."""
    experts = config.experts
    found = [config.intermediate_size] if experts is None or not all(experts.layers) else []
    if experts is not None:
        found += [width for width in (experts.intermediate_size, experts.shared_size) if width]
    return found


def _in_words(sizes: Sequence[int]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
