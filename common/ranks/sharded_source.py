"""A rank's part of a model's files: the assembler asks for tensors by name, and gets the rank's slices of them.

rows       q, k, v (whole heads), gate and up, and the vocabulary     the rank computes some outputs
columns    o and down                                                 the rank adds some inputs to all outputs
whole      norms, routers                                             every rank computes the same
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import ModelError
from common.model.safetensors_weights import SafetensorsWeights
from common.model_config.shard import Shard
from common.model_files.config import ModelConfig
from kernels import QuantisedWeight

GATES, DOWNS = ("gate_proj", "up_proj", "w1", "w3"), ("down_proj", "w2")
VOCABULARY = ("embed_tokens", "lm_head")
ROWS, COLUMNS = 0, 1


@dataclass(frozen=True, slots=True)
class Cut:
    """The `ranges` of a tensor along dimension `dim`, one behind the other. `total`: how long that dimension is."""

    dim: int
    ranges: tuple[range, ...]
    total: int


class CutRules:
    """What a rank reads of each tensor. Pure."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        """`config` is that of the whole model."""
        self._config, self._shard = config, shard

    def of(self, name: str, shape: Sequence[int]) -> Cut | None:
        """The rank's part of the tensor of that name and shape; None: all of it."""
        config, shard = self._config, self._shard
        module, _, kind = name.rpartition(".")
        last = module.rpartition(".")[2]
        if kind == "sinks":
            return self._stacked(config.num_heads, unit=1)
        match last:
            case "q_proj":
                return self._stacked(config.num_heads)
            case "k_proj" | "v_proj":
                return self._stacked(0, config.num_kv_heads)
            case "qkv_proj":
                return self._stacked(config.num_heads, config.num_kv_heads, config.num_kv_heads)
            case "o_proj" if kind == "weight":
                cut = self._stacked(config.num_heads)
                return Cut(COLUMNS, cut.ranges, cut.total)
            case "gate_up_proj":
                half = shape[0] // 2
                part = shard.part(half)
                return Cut(ROWS, (part, range(half + part.start, half + part.stop)), shape[0])
        if last in GATES or last in VOCABULARY:
            return Cut(ROWS, (shard.part(shape[0]),), shape[0])
        if last in DOWNS and kind == "weight":
            return Cut(COLUMNS, (shard.part(shape[1]),), shape[1])
        return None

    def is_added_once(self, name: str) -> bool:
        """Whether a tensor belongs to rank 0 alone: the bias of a sum over all ranks."""
        return name.endswith(tuple(f".{last}.bias" for last in ("o_proj", *DOWNS)))

    def _stacked(self, heads: int, *kv_heads: int, unit: int = 0) -> Cut:
        """Query heads, and below them KV heads once or twice, of `unit` rows each (0: head_dim)."""
        unit, ranges, first = unit or self._config.head_dim, [], 0
        groups = [(heads, self._shard.part(heads))] if heads else []
        groups += [(total, self._shard.kv_heads(total)) for total in kv_heads]
        for total, part in groups:
            ranges.append(range(first + part.start * unit, first + part.stop * unit))
            first += total * unit
        return Cut(ROWS, tuple(ranges), first)


class ShardedSource:
    """A `WeightSource` of one rank's slices; nothing else is read. `num_bytes` were read so far."""

    def __init__(self, files: SafetensorsWeights, config: ModelConfig, shard: Shard) -> None:
        self._files, self._rules, self._shard = files, CutRules(config, shard), shard
        self.num_bytes = 0

    @property
    def label(self) -> str:
        return self._files.label

    @property
    def norm_offset(self) -> float:
        return self._files.norm_offset

    @property
    def has_quantised(self) -> bool:
        return False

    def has(self, name: str) -> bool:
        return self._files.has(name)

    def is_quantised(self, name: str) -> bool:
        return False

    def read_quantised(self, name: str) -> QuantisedWeight | None:
        return None

    def read(self, name: str) -> Tensor:
        """The rank's part. ModelError where the file's tensor has another size than the configuration wants."""
        shape = self._files.head(name).shape
        cut = self._rules.of(name, shape)
        if cut is None:
            tensor = self._files.read(name)
            found = torch.zeros_like(tensor) if self._shard.rank and self._rules.is_added_once(name) else tensor
        else:
            if len(shape) <= cut.dim or shape[cut.dim] != cut.total:
                raise ModelError(
                    f"{self.label}: tensor {name} is {list(shape)}, the configuration wants {cut.total} in dimension "
                    f"{cut.dim}: configuration and weights are not of one model, fetch both again"
                )
            found = self._files.read_ranges(name, cut.dim, cut.ranges)
        self.num_bytes += found.nbytes
        return found
