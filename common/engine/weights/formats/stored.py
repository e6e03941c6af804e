"""What a file says of its weights before any of them is read: how many there are, and in which form."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

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


@dataclass(frozen=True, slots=True)
class TensorHead:
    """Type, by safetensors' name, and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]


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
