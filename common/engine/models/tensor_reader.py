"""A checkpoint's tensors as a decoder wants them: checked, stacked by rows, converted, and quantised if asked to."""

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
    """A file or folder of tensors, by Hugging Face's names."""

    def read(self, name: str) -> Tensor:
        """The tensor, of any float dtype. ModelError when it is missing."""

    def has(self, name: str) -> bool: ...

    def read_quantised(self, name: str, *, floats: bool = False) -> QuantisedWeight | None:
        """The tensor in the integers that the file stores; None where kernels multiply no such ones. A stack of
        matrices comes as one, each below the other.

        With `floats` also in small floats (e4m3, e2m1), which kernels of a GPU multiply.
        """

    def is_quantised(self, name: str) -> bool:
        """Whether the file holds the tensor in fewer bits than 16."""

    @property
    def has_quantised(self) -> bool:
        """Whether the file holds any such tensor."""

    @property
    def label(self) -> str:
        """The source's name in errors."""

    @property
    def norm_offset(self) -> float:
        """Added to norm weights of families with `offset_norms`: 1.0 where the file stores them less one."""


class StoredWeights(WeightSource, Protocol):
    """One that knows what it holds before it reads any of it."""

    def stored(self) -> Sequence[StoredTensor]:
        """All tensors, quantised ones as one each. Reads heads alone."""

    def stored_bytes(self, name: str) -> int:
        """Those in the file of the tensor of that name, 0 where there is none."""


class TensorReader:
    """Reads tensors of a source by name, checks their shapes, and quantises matrices if asked to."""

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
        """`batch_invariant`: of the products that are made, as `kernels.Linear` has it."""
        self.config, self.source, self.dtype, self.device = config, source, dtype, device
        self.quantization, self.batch_invariant = quantization, batch_invariant
        self.treated: Counter[str] = Counter()
        """How many of the file's matrices are kept, in how many bits, or in floats."""
        self.on_read: Callable[[str], None] = lambda _: None
        """Called with the name of each tensor before it is read, maybe twice."""

    def mlp(self, prefix: str, inner: int) -> MLP:
        """The gated MLP whose tensors' names begin so."""
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
        """One matrix product with `parts` stacked by rows, which `order`, int64 [rows], then reorders."""
        names = {f"{prefix}{part}.weight": rows for part, rows in parts.items()}
        weight = self.weight(names, columns, self.quantization)
        bias = self.bias({f"{prefix}{part}.bias": rows for part, rows in parts.items()}) if biased else None
        if order is not None:
            order = order.to(self.device)
            weight = reordered(weight, order)
            bias = None if bias is None else bias[order]
        return self.product(kind, weight, bias)

    def product(self, kind: type[L], weight: Weight, bias: Tensor | None = None) -> L:
        """As this worker multiplies."""
        return kind(weight, bias, dtype=self.dtype, batch_invariant=self.batch_invariant)

    def weight(self, parts: Mapping[str, int], columns: int, quantization: Quantization) -> Weight:
        """Matrices stacked by rows: as the file holds them, dense, or quantised."""
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
        how = f"rounded to {bits} bits" if rounded else f"held in {str(self.dtype).removeprefix('torch.')}"
        self.treated[how] += len(parts)
        return rounded or dense.to(self.dtype)

    def held_stack(self, name: str, count: int, rows: int, columns: int) -> list[QuantisedWeight] | None:
        """The matrices of a stack as the file holds them, each [rows, columns]; None where they are to be floats."""
        held = self._held(name, count * rows, columns) if self.quantization.keeps_held else None
        if held is None or not self.quantization.takes(held.bits):
            return None
        self.treated[f"kept in {held.bits} bits"] += count
        return held.map(lambda tensor: tensor.to(self.device)).parted(count)

    def as_asked(self, dense: Tensor, in_file: bool) -> Weight:
        """A matrix that is part of a tensor, dense or quantised; `in_file`: whether that holds fewer bits than 16."""
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
        """The tensor, which must be of floats and have that shape, or one of the others."""
        self.on_read(name)
        tensor = self.source.read(name)
        if tuple(tensor.shape) not in [tuple(one) for one in (shape, *others)]:
            raise ModelError(
                f"{self.source.label}: tensor {name} is {list(tensor.shape)}, the configuration wants {list(shape)}: "
                "configuration and weights are not of one model, fetch both again"
            )
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ModelError(
                f"{self.source.label}: tensor {name} has dtype {tensor.dtype}, which is not supported: "
                "use float32, float16 or bfloat16 weights, or a GGUF file"
            )
        return tensor

    def _dense_dtype(self, quantization: Quantization) -> torch.dtype:
        """The type that matrices are quantised from: wide enough for the file's own values."""
        return self.dtype if quantization is Quantization.NONE else torch.float32

    def _rounds_to(self, quantization: Quantization, in_file: bool) -> int:
        """Bits that a matrix is rounded to, 0 for none: a GPU keeps what a file holds, and rounds nothing."""
        return quantization.bits(in_file) if self.device.type == "cpu" else 0

    def _held(self, name: str, rows: int, columns: int) -> QuantisedWeight | None:
        self.on_read(name)
        held = self.source.read_quantised(name, floats=self.device.type != "cpu")
        return held if held is not None and held.shape == (rows, columns) else None

    def _stack(self, out: Tensor, parts: Mapping[str, int]) -> Tensor:
        """Copies the tensors into `out`, one below the other."""
        at = 0
        for name, count in parts.items():
            out[at : at + count] = self.checked(name, (count, *out.shape[1:]))
            at += count
        return out


def reordered(weight: Weight, order: Tensor) -> Weight:
    """The matrix with its rows in another order, int64 [rows]."""
    return weight.rows(order) if isinstance(weight, QuantisedWeight) else weight[order]
