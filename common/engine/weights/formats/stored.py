"""Description of stored weights before reading them: their number and form."""

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
"""Bytes per element, by safetensors type name. Other types have one byte."""
TABLE: Final = ("model.embed_tokens.weight", "token_embd.weight")
HEAD: Final = ("lm_head.weight", "output.weight")
LAYER: Final = re.compile(r"(?:model\.layers|blk)\.(\d+)\.")
COPIES: Final = ("embed_tokens.weight", "shared_head.head.weight")
"""Tensors in MTP layers that repeat the model's."""
KERNEL_GROUP: Final = 64
"""Maximum number of weights per scale for integer kernels."""


@dataclass(frozen=True, slots=True)
class TensorHead:
    """Type (safetensors name) and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]


class StoredForm(StrEnum):
    """Numeric form of a tensor: floats of at least 16 bits, integers supported by kernels, floats of 8 or 4 bits
    supported by GPU kernels, or numbers that no kernel supports."""

    FLOATS = "floats"
    INTEGERS = "integers"
    SMALL_FLOATS = "small floats"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file, or all parts of a quantised one. `num_bytes`: size in the file. `bits`: per weight.

    `group`: number of integers that share a scale; 0 if scales have steps, or there are none. `dtype`: torch name of
    floats that are usable without a copy; "" otherwise.
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
        """Index of the tensor's layer, or None."""
        found = LAYER.match(self.name)
        return None if found is None else int(found[1])

    def is_of(self, num_layers: int) -> bool:
        """Return whether a model with `num_layers` layers reads the tensor."""
        if self.name in TABLE or self.name in HEAD:
            return True
        layer = self.layer
        return layer is not None and layer < num_layers and not self.name.endswith(COPIES)


def bytes_of(head: TensorHead) -> int:
    """Return the size of a tensor in a safetensors file, in bytes."""
    return math.prod(head.shape) * ITEM_BYTES.get(head.dtype, 1)


def plain_tensor(name: str, head: TensorHead) -> StoredTensor:
    """Describe an unquantised tensor."""
    count, bits = math.prod(head.shape), 8 * ITEM_BYTES.get(head.dtype, 1)
    dtype = {"F32": "float32", "BF16": "bfloat16"}.get(head.dtype, "")
    return StoredTensor(name, bytes_of(head), count, bits, dtype=dtype, is_matrix=len(head.shape) > 1)
