"""Loads a rank's shard of a model: the assembler requests tensors by name and gets the rank's slices.

rows       q, k, v (whole heads), gate and up, and the vocabulary;    the rank computes a part of the outputs
           norms over all heads
columns    o and down                                                 the rank adds its inputs' part to all outputs
whole      norms, routers, projections to latents                     all ranks compute the same
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.engine.kv import torch_dtype
from common.engine.models import (
    DECODERS,
    Assembler,
    Collectives,
    Decoder,
    StoredWeights,
    TensorParallel,
    WeightSource,
    check_batch_invariant,
    effective_quantization,
    log_treated,
    open_model,
    reading,
    torch_device,
)
from common.engine.weights import SafetensorsWeights
from common.errors import ConfigError, ModelError
from common.model_files import ModelConfig, Quantization
from common.model_files.architecture import ExpertStack, Shard, check_size
from kernels import QuantisedWeight, rounding_group

if TYPE_CHECKING:
    from common.model_files import ModelFiles

VOCABULARY = ("embed_tokens", "lm_head")
ROWS, COLUMNS = 0, 1


@dataclass(frozen=True, slots=True)
class Cut:
    """Concatenated `ranges` of a tensor along dimension `dim`, whose length is `total`.

    `of_inputs`: the dimension is that of a matrix's inputs, so results are summed over ranks.
    """

    dim: int
    ranges: tuple[range, ...]
    total: int
    of_inputs: bool = False


class CutRules:
    """Slices of each tensor that a rank reads. Pure."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        """`config` is the configuration of the whole model."""
        self._config, self._shard = config, shard
        experts = config.family.experts
        self._gates, self._downs = ("gate_proj", "up_proj", *experts.gates), ("down_proj", experts.down)
        self._inner = config.experts.intermediate_size if config.experts is not None else 0

    def of(self, name: str, shape: Sequence[int], *, quantised: bool = False) -> Cut | None:
        """Return the rank's part of a tensor, or None for all of it."""
        config, shard = self._config, self._shard
        module, _, kind = name.rpartition(".")
        last = module.rpartition(".")[2]
        stack = config.family.experts.stack
        if stack is not None and (at := name.find(stack.gate_up)) >= 0:
            return self._of_gates(stack, name[at + len(stack.gate_up) :] == "_bias", shape, quantised)
        if stack is not None and name.endswith(stack.down):
            turned = not quantised and stack.is_turned(shape, config.hidden_size, self._inner)
            return Cut(1 if turned else 2, (shard.part(self._inner),), self._inner, of_inputs=True)
        if kind == "sinks":
            return self._stacked(config.num_heads, unit=1)
        match last:
            case "q_norm" if config.wide_qk_norm:
                return self._stacked(config.num_heads)
            case "k_norm" if config.wide_qk_norm:
                return self._stacked(0, config.num_kv_heads)
            case "q_proj" | "q_b_proj":
                return self._stacked(config.num_heads, unit=config.latent.query_dim if config.latent else 0)
            case "kv_b_proj" if config.latent is not None:
                return self._stacked(config.num_heads, unit=config.latent.nope_dim + config.latent.value_dim)
            case "k_proj" | "v_proj":
                return self._stacked(0, config.num_kv_heads)
            case "qkv_proj":
                return self._stacked(config.num_heads, config.num_kv_heads, config.num_kv_heads)
            case "o_proj" if kind == "weight":
                cut = self._stacked(config.num_heads, unit=config.value_dim)
                return Cut(COLUMNS, cut.ranges, cut.total, of_inputs=True)
            case "gate_up_proj":
                half = shape[0] // 2
                part = shard.part(half)
                return Cut(ROWS, (part, range(half + part.start, half + part.stop)), shape[0])
        if last in self._gates or last in VOCABULARY:
            return Cut(ROWS, (shard.part(shape[0]),), shape[0])
        if last in self._downs and kind == "weight":
            return Cut(COLUMNS, (shard.part(shape[1]),), shape[1], of_inputs=True)
        return None

    def is_added_once(self, name: str) -> bool:
        """Whether only rank 0 has a tensor: the bias of an output that is summed over ranks."""
        biases = tuple(f".{last}.bias" for last in ("o_proj", *self._downs))
        return name.endswith((*biases, ".experts.down_proj_bias"))

    def _of_gates(self, stack: ExpertStack, is_bias: bool, shape: Sequence[int], quantised: bool) -> Cut:
        """Return the cut of all experts' gates and ups, or of their biases [experts, out]."""
        half = self._inner
        turned = not (quantised or is_bias) and stack.is_turned(shape, 2 * half, self._config.hidden_size)
        part, dim = self._shard.part(half), 2 if turned else 1
        if stack.alternating:
            return Cut(dim, (range(2 * part.start, 2 * part.stop),), 2 * half)
        return Cut(dim, (part, range(half + part.start, half + part.stop)), 2 * half)

    def _stacked(self, heads: int, *kv_heads: int, unit: int = 0) -> Cut:
        """Return the cut of query heads followed by KV heads (once or twice), of `unit` rows each (0: head_dim)."""
        unit, ranges, first = unit or self._config.head_dim, [], 0
        groups = [(heads, self._shard.part(heads))] if heads else []
        groups += [(total, self._shard.kv_heads(total)) for total in kv_heads]
        for total, part in groups:
            ranges.append(range(first + part.start * unit, first + part.stop * unit))
            first += total * unit
        return Cut(ROWS, tuple(ranges), first)


class ShardedSource:
    """`WeightSource` of one rank's slices. `num_bytes` counts what was kept.

    Reads only the slices of float safetensors. Quantised tensors and those of GGUF files are read whole, one at a time.
    """

    def __init__(self, source: WeightSource, config: ModelConfig, shard: Shard, quantization: Quantization) -> None:
        """If `quantization` keeps or makes integers, a rank's inputs must be whole groups of them.

        With none, as on GPUs, a matrix whose groups would be cut is read as floats.
        """
        self._source, self._rules, self._shard = source, CutRules(config, shard), shard
        self._quantization = quantization
        self._num_stacked = config.experts.count if config.experts is not None else 1
        self.num_bytes = 0

    @property
    def label(self) -> str:
        return self._source.label

    @property
    def norm_offset(self) -> float:
        return self._source.norm_offset

    @property
    def has_quantised(self) -> bool:
        return self._source.has_quantised

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def is_quantised(self, name: str) -> bool:
        return self._source.is_quantised(name)

    def read_quantised(self, name: str, *, floats: bool = False) -> QuantisedWeight | None:
        held = self._source.read_quantised(name, floats=floats)
        count = self._num_stacked if name.rpartition(".")[0].endswith(".experts") else 1
        if held is None or (cut := self._cut(name, _stack_shape(held, count))) is None:
            return held
        if cut.of_inputs:
            (part,) = cut.ranges
            if self._quantization is Quantization.NONE and _cuts(part, held.whole_inputs):
                return None  # read this matrix as floats
            self._check_groups(name, cut, held.whole_inputs)
            found = held.columns(part)
        else:
            each, outputs = _indices(cut), held.shape[0] // count
            found = held.rows(torch.cat([each + i * outputs for i in range(count)]))
        self.num_bytes += found.numbers.nbytes
        return found

    def read(self, name: str) -> Tensor:
        """Return the rank's part. Raises ModelError if the tensor's shape does not match the configuration."""
        source = self._source
        if isinstance(source, SafetensorsWeights) and not source.is_quantised(name):
            cut = self._cut(name, source.head(name).shape)
            found = source.read(name) if cut is None else source.read_ranges(name, cut.dim, cut.ranges)
        else:
            found = source.read(name)
            cut = self._cut(name, found.shape)
            found = found if cut is None else found.index_select(cut.dim, _indices(cut))
        if cut is not None and cut.of_inputs and (bits := self._quantization.bits(source.is_quantised(name))):
            self._check_groups(name, cut, rounding_group(bits, cut.total) or 1)
        if cut is None and self._shard.rank and self._rules.is_added_once(name):
            found = torch.zeros_like(found)
        self.num_bytes += found.nbytes
        return found

    def _cut(self, name: str, shape: Sequence[int]) -> Cut | None:
        cut = self._rules.of(name, shape, quantised=self._source.is_quantised(name))
        if cut is not None and (len(shape) <= cut.dim or shape[cut.dim] != cut.total):
            raise ModelError(
                f"{self.label}: tensor {name} has shape {list(shape)}, the configuration requires {cut.total} in "
                f"dimension {cut.dim}: configuration and weights are not of the same model, fetch both again"
            )
        return cut

    def _check_groups(self, name: str, cut: Cut, group: int) -> None:
        """Raise ConfigError if the rank's inputs are not whole groups, so that its integers would differ."""
        (part,) = cut.ranges
        if _cuts(part, group):
            allowed = (
                f"a number of ranks that divides the {cut.total} inputs of {name} into whole groups of {group}; "
                "or --quantization none"
            )
            raise ConfigError("tensor_parallel_size", self._shard.size, allowed)


def _stack_shape(held: QuantisedWeight, count: int) -> tuple[int, ...]:
    """Return the shape of a matrix, or of a stack of `count` matrices stored one below the other."""
    rows, columns = held.shape
    return (rows, columns) if count == 1 else (count, rows // count, columns)


def _cuts(part: range, group: int) -> bool:
    """Whether these inputs cut a group."""
    return bool(part.start % group or part.stop % group)


def _indices(cut: Cut) -> Tensor:
    """Return the indices of all ranges, int64."""
    return torch.cat([torch.arange(part.start, part.stop) for part in cut.ranges])


def open_for_ranks(files: ModelFiles, size: int) -> tuple[ModelConfig, StoredWeights]:
    """Return the configuration and unread weights of the model. Raises ConfigError if it has no split into `size`."""
    config, source = open_model(files)
    check_size(config, size)
    return config, source


def load_shard(
    files: ModelFiles,
    shard: Shard,
    collectives: Collectives,
    *,
    dtype: str,
    device: str,
    quantization: str,
    with_head: bool = True,
    batch_invariant: bool = False,
) -> Decoder:
    """Read the slices of one rank. Options and errors are those of `load_model` and `open_for_ranks`."""
    config, source = open_for_ranks(files, shard.size)
    place = torch_device(device)
    if batch_invariant:
        check_batch_invariant(place)
    wanted = effective_quantization(quantization, source, place)
    own = shard.of(config)
    held = replace(own, vocab_size=len(shard.part(config.vocab_size)))
    rounded = wanted if place.type == "cpu" else Quantization.NONE
    sliced = ShardedSource(source, config, shard, rounded)
    assembler = Assembler(held, sliced, torch_dtype(dtype), place, wanted, batch_invariant=batch_invariant)
    with nullcontext() if shard.rank else reading(files, assembler, source, config):
        weights = assembler.assemble(with_head=with_head)
    decoder = DECODERS[config.family.decoder](own, weights)
    if not shard.rank:
        log_treated(files, assembler)
    decoder.join_ranks(TensorParallel(shard, config.vocab_size, collectives))
    return decoder
