"""What a file says of its weights before any of them is read: how many there are, and in which form."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from common.engine.weights.formats.bit_fields import WORD_BITS
from common.engine.weights.formats.tensors import PACKED, CheckpointTensors, TensorHead

ITEM_BYTES: Final = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
}
"""By safetensors' names of types; one byte of others."""
TABLE: Final = ("model.embed_tokens.weight", "token_embd.weight")
HEAD: Final = ("lm_head.weight", "output.weight")
LAYER: Final = re.compile(r"(?:model\.layers|blk)\.(\d+)\.")
COPIES: Final = ("embed_tokens.weight", "shared_head.head.weight")
"""In MTP layers, of what the model has."""
KERNEL_GROUP: Final = 64
"""Weights that share a scale at most, where kernels multiply integers."""


class StoredForm(StrEnum):
    """What a tensor is made of: floats of 16 bits or more; integers that kernels multiply; floats of 8 or 4 bits, which
    kernels of a GPU multiply; or small numbers that no kernel multiplies."""

    FLOATS = "floats"
    INTEGERS = "integers"
    SMALL_FLOATS = "small floats"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file, or the parts of a quantised one together. `num_bytes` are those in the file.

    `bits` of each weight. `group`: integers that share one scale; 0 where scales have steps, or there are none.
    `dtype`: of floats as they can be used without a copy, by torch's name; "" where they cannot.
    """

    name: str
    num_bytes: int
    num_weights: int
    bits: int
    form: StoredForm = StoredForm.FLOATS
    group: int = 0
    dtype: str = ""
    is_matrix: bool = True

    @property
    def layer(self) -> int | None:
        """Which layer it belongs to; None: to none."""
        found = LAYER.match(self.name)
        return None if found is None else int(found[1])

    def is_of(self, num_layers: int) -> bool:
        """Whether a model of so many layers reads it."""
        if self.name in TABLE or self.name in HEAD:
            return True
        layer = self.layer
        return layer is not None and layer < num_layers and not self.name.endswith(COPIES)


def bytes_of(head: TensorHead) -> int:
    """Of a tensor in a safetensors file."""
    return math.prod(head.shape) * ITEM_BYTES.get(head.dtype, 1)


def plain_tensor(name: str, head: TensorHead) -> StoredTensor:
    """A tensor that stands for itself."""
    count, bits = math.prod(head.shape), 8 * ITEM_BYTES.get(head.dtype, 1)
    dtype = {"F32": "float32", "BF16": "bfloat16"}.get(head.dtype, "")
    return StoredTensor(name, bytes_of(head), count, bits, dtype=dtype, is_matrix=len(head.shape) > 1)


def module_tensor(tensors: CheckpointTensors, module: str) -> StoredTensor:
    """A quantised module by its largest part; scales are left out."""
    name = f"{module}.weight"
    if tensors.has(module + PACKED):  # AWQ and GPTQ
        head, outputs = tensors.head(module + PACKED), tensors.head(f"{module}.scales").shape[1]
        bits = tensors.head(f"{module}.qzeros").shape[1] * WORD_BITS // outputs
        count = math.prod(head.shape) * WORD_BITS // bits
        return StoredTensor(name, bytes_of(head), count, bits, StoredForm.INTEGERS, KERNEL_GROUP)
    if tensors.has(f"{module}.weight_packed"):
        head = tensors.head(f"{module}.weight_packed")
        rows, columns = tensors.tensor(f"{module}.weight_shape").tolist()
        bits = 8 if head.shape[1] * WORD_BITS >= columns * 8 else 4
        return StoredTensor(name, bytes_of(head), rows * columns, bits, StoredForm.INTEGERS, KERNEL_GROUP)
    if tensors.has(f"{module}_blocks"):  # MXFP4
        head = tensors.head(f"{module}_blocks")
        return StoredTensor(module, bytes_of(head), 2 * bytes_of(head), 4, StoredForm.SMALL_FLOATS)
    head = tensors.head(name)
    form = StoredForm.INTEGERS if head.dtype == "I8" else StoredForm.SMALL_FLOATS
    group = KERNEL_GROUP if form is StoredForm.INTEGERS else 0
    return StoredTensor(name, bytes_of(head), math.prod(head.shape), 8, form, group)
