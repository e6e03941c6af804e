"""Reads checkpoint tensors for a decoder: checks shapes, stacks rows, converts dtypes and quantises if requested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from common.engine.models.mlp import MLP
from common.engine.weights.formats import StoredTensor
from common.errors import ModelError
from common.model_files import ModelConfig, Quantization
from kernels import GatedLinear, Linear, QuantisedWeight, Weight, quantise, unified

L = TypeVar("L", bound=Linear)


class WeightSource(Protocol):
    """File or folder of tensors, under Hugging Face names."""

    def read(self, name: str) -> Tensor:
        """Read a tensor of any float dtype. Raises ModelError if it is missing."""

    def has(self, name: str) -> bool: ...

    def read_quantised(self, name: str, *, floats: bool = False) -> QuantisedWeight | None:
        """Read a tensor in its stored integer format, without dequantising; None if no kernel supports the format.

        A stack of matrices is returned as one matrix, stacked by rows. `floats` also allows small floats (e4m3, e2m1),
        which GPU kernels support.
        """

    def is_quantised(self, name: str) -> bool:
        """Return whether the file stores the tensor in fewer than 16 bits."""

    @property
    def has_quantised(self) -> bool:
        """Whether the file contains quantised tensors."""

    @property
    def label(self) -> str:
        """Name of the source in errors."""

    @property
    def norm_offset(self) -> float:
        """Offset of norm weights of families with `offset_norms`: 1.0 if the file stores them minus one."""


class StoredWeights(WeightSource, Protocol):
    """Source with a known list of tensors before reading any."""

    def stored(self) -> Sequence[StoredTensor]:
        """Return all tensors, counting a quantised tensor as one. Reads only headers."""

    def stored_bytes(self, name: str) -> int:
        """Return the stored size of a tensor in bytes, 0 if it does not exist."""


class TensorReader:
    """Reads tensors by name, checks their shapes, and quantises matrices if requested."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization = Quantization.NONE,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """`batch_invariant`: property of the products, see `kernels.Linear`."""
        self.config, self.source, self.dtype, self.device = config, source, dtype, device
        self.quantization, self.batch_invariant = quantization, batch_invariant
        self.treated: Counter[str] = Counter()
        """Number of the file's matrices by how they are stored in memory, for the log."""
        self.on_read: Callable[[str], None] = lambda _: None
        """Called with the name of each tensor before it is read, possibly twice."""

    def mlp(self, prefix: str, inner: int) -> MLP:
        """Read the gated MLP with this tensor name prefix."""
        config, hidden = self.config, self.config.hidden_size
        gates = {"gate_up_proj": 2 * inner} if config.fused_gate_up else {"gate_proj": inner, "up_proj": inner}
        return MLP(
            self.linear(GatedLinear, prefix, gates, hidden, config.mlp_bias),
            self.linear(Linear, prefix, {"down_proj": hidden}, inner, config.mlp_bias),
        )

    def linear(
        self,
        kind: type[L],
        prefix: str,
        parts: Mapping[str, int],
        columns: int,
        biased: bool,
        order: Tensor | None = None,
    ) -> L:
        """Read a matrix product, with `parts` stacked by rows and then permuted by `order`, int64 [rows]."""
        names = {f"{prefix}{part}.weight": rows for part, rows in parts.items()}
        weight = self.weight(names, columns, self.quantization)
        bias = self.bias({f"{prefix}{part}.bias": rows for part, rows in parts.items()}) if biased else None
        if order is not None:
            order = order.to(self.device)
            weight = reordered(weight, order)
            bias = None if bias is None else bias[order]
        return self.product(kind, weight, bias)

    def product(self, kind: type[L], weight: Weight, bias: Tensor | None = None) -> L:
        """Create a product with this worker's settings."""
        return kind(weight, bias, dtype=self.dtype, batch_invariant=self.batch_invariant)

    def weight(self, parts: Mapping[str, int], columns: int, quantization: Quantization) -> Weight:
        """Read matrices stacked by rows: as stored, dense, or quantised."""
        held = [self._held(name, rows, columns) for name, rows in parts.items()] if quantization.keeps_held else []
        if held and all(part is not None and quantization.takes(part.bits) for part in held):
            whole = [part for part in held if part is not None]
            if (together := unified(whole)) is not None:
                self.treated[f"kept in {together.bits} bits"] += len(parts)
                return together.map(lambda tensor: tensor.to(self.device))
        dense = torch.empty(sum(parts.values()), columns, dtype=self._dense_dtype(quantization), device=self.device)
        self._stack(dense, parts)
        bits = self._rounds_to(quantization, all(self.source.is_quantised(name) for name in parts))
        rounded = quantise(dense, bits) if bits else None
        how = f"rounded to {bits} bits" if rounded else f"dequantised to {str(self.dtype).removeprefix('torch.')}"
        self.treated[how] += len(parts)
        return rounded or dense.to(self.dtype)

    def held_stack(self, name: str, count: int, rows: int, columns: int) -> list[QuantisedWeight] | None:
        """Read a stack's matrices as stored, [rows, columns] each; None if they must be dequantised."""
        held = self._held(name, count * rows, columns) if self.quantization.keeps_held else None
        if held is None or not self.quantization.takes(held.bits):
            return None
        self.treated[f"kept in {held.bits} bits"] += count
        return held.map(lambda tensor: tensor.to(self.device)).parted(count)

    def as_asked(self, dense: Tensor, in_file: bool) -> Weight:
        """Convert part of a tensor to a dense or quantised matrix. `in_file`: the file stores fewer than 16 bits."""
        dense, bits = dense.to(self.device).contiguous(), self._rounds_to(self.quantization, in_file)
        return (quantise(dense, bits) if bits else None) or dense.to(self.dtype)

    def matrix(self, name: str, *shape: int) -> Tensor:
        return self.checked(name, shape).to(device=self.device, dtype=self.dtype).contiguous()

    def bias(self, parts: Mapping[str, int]) -> Tensor:
        return self._stack(torch.empty(sum(parts.values()), dtype=self.dtype, device=self.device), parts)

    def norm(self, name: str, size: int) -> Tensor:
        weight = self.checked(name, (size,)).float()
        return (weight + (self.source.norm_offset if self.config.family.offset_norms else 0.0)).to(self.device)

    def checked(self, name: str, shape: Sequence[int], *others: Sequence[int]) -> Tensor:
        """Read a float tensor that must have `shape` or one of `others`."""
        self.on_read(name)
        tensor = self.source.read(name)
        if tuple(tensor.shape) not in [tuple(one) for one in (shape, *others)]:
            raise ModelError(
                f"{self.source.label}: tensor {name} is {list(tensor.shape)}, the configuration requires "
                f"{list(shape)}: configuration and weights are of different models, download both again"
            )
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ModelError(
                f"{self.source.label}: unsupported dtype {tensor.dtype} of tensor {name}: "
                "use float32, float16 or bfloat16 weights, or a GGUF file"
            )
        return tensor

    def _dense_dtype(self, quantization: Quantization) -> torch.dtype:
        """Return the dtype that matrices are quantised from, wide enough for the stored values."""
        return self.dtype if quantization is Quantization.NONE else torch.float32

    def _rounds_to(self, quantization: Quantization, in_file: bool) -> int:
        """Return the bits that a matrix is rounded to; 0 for none. On a GPU, matrices are never rounded."""
        return quantization.bits(in_file) if self.device.type == "cpu" else 0

    def _held(self, name: str, rows: int, columns: int) -> QuantisedWeight | None:
        self.on_read(name)
        held = self.source.read_quantised(name, floats=self.device.type != "cpu")
        return held if held is not None and held.shape == (rows, columns) else None

    def _stack(self, out: Tensor, parts: Mapping[str, int]) -> Tensor:
        """Copy the tensors into `out`, stacked by rows."""
        at = 0
        for name, count in parts.items():
            out[at : at + count] = self.checked(name, (count, *out.shape[1:]))
            at += count
        return out


def reordered(weight: Weight, order: Tensor) -> Weight:
    """Return the matrix with its rows permuted by `order`, int64 [rows]."""
    return weight.rows(order) if isinstance(weight, QuantisedWeight) else weight[order]
