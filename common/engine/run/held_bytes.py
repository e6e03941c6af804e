"""The fewest bytes that weights can take in memory, computed from the headers of their files. Pure.

It is a lower bound, because a worker that would run must not be refused: packing may lose nothing in fewer
bits (`kernels/cpu/packed.py`), tables that are used as they lie in their file are page cache, which the kernel drops,
and vectors, padding and the scales of some formats are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from common.engine.weights.formats import HEAD, TABLE, StoredForm, StoredTensor
from common.model_files import Quantization

DTYPE_BYTES: Final = {"float32": 4.0, "bfloat16": 2.0}
LEAST_PACKED: Final = {"float32": 2.0, "bfloat16": 1.5}
"""Bytes of a weight on a CPU, whose kernels widen 16 bits to float32, and 12 bits to bfloat16."""
ROUNDED: Final = {8: 1.0 + (2 + 4) / 64, 4: 0.5 + (2 + 2) / 32}
"""Bytes of a weight by its bits, with the scale and the offset of its group."""
ALWAYS_FLOATS: Final = ("kv_b_proj.weight", "attn_kv_b.weight", "attn_k_b.weight", "attn_v_b.weight")
"""The endings of names of matrices that are never quantised, because they make keys and values of latents."""


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """How a worker holds the matrices of a model: see `Quantization`; on a CPU or on a GPU.

    `tied`: the table of embeddings is the head, too. `with_head`: the model makes logits.
    """

    dtype: str
    quantization: Quantization
    on_cpu: bool
    tied: bool
    with_head: bool = True

    def of(self, tensors: Iterable[StoredTensor]) -> int:
        """Bytes that the matrices among these take, at least."""
        return int(sum(self._bytes_of(tensor) for tensor in tensors if tensor.is_matrix))

    def _bytes_of(self, tensor: StoredTensor) -> float:
        if tensor.name in HEAD:
            return 0.0 if self.tied or not self.with_head else self._matrix(tensor, self.quantization.head)
        if tensor.name in TABLE:
            return self._table(tensor)
        if tensor.name.endswith(ALWAYS_FLOATS):
            return self._dense(tensor)
        return self._matrix(tensor, self.quantization)

    def _table(self, tensor: StoredTensor) -> float:
        """Bytes of the table of embeddings, and of the head where it reads the same numbers."""
        is_mapped = self.on_cpu and tensor.dtype == self.dtype
        table = 0.0 if is_mapped else tensor.num_weights * DTYPE_BYTES[self.dtype]
        if not (self.tied and self.with_head):
            return table
        if self.quantization is Quantization.NONE:  # one copy serves both
            return self._dense(tensor)
        return table + self._matrix(tensor, self.quantization.head)

    def _matrix(self, tensor: StoredTensor, wanted: Quantization) -> float:
        if self._is_kept(tensor, wanted):
            return self._kept(tensor)
        bits = wanted.bits(tensor.form is not StoredForm.FLOATS) if self.on_cpu else 0
        return tensor.num_weights * ROUNDED[bits] if bits else self._dense(tensor)

    def _is_kept(self, tensor: StoredTensor, wanted: Quantization) -> bool:
        is_multiplied = tensor.form is StoredForm.INTEGERS or (
            tensor.form is StoredForm.SMALL_FLOATS and not self.on_cpu
        )
        return is_multiplied and wanted.keeps_held and wanted.takes(tensor.bits)

    def _kept(self, tensor: StoredTensor) -> float:
        if not self.on_cpu or not tensor.group:
            return tensor.num_bytes
        return tensor.num_weights * (tensor.bits / 8 + (6 if tensor.bits == 8 else 4) / tensor.group)

    def _dense(self, tensor: StoredTensor) -> float:
        # Integers times their scales fill float32.
        fits_fewer = self.on_cpu and (tensor.form is not StoredForm.INTEGERS or self.dtype == "bfloat16")
        return tensor.num_weights * (LEAST_PACKED if fits_fewer else DTYPE_BYTES)[self.dtype]
