"""Values of `--quantization`: the number of bits of a model's matrices."""

from __future__ import annotations

from enum import StrEnum


class Quantization(StrEnum):
    """Quantisation of matrices. Embeddings and norms are never quantised; the output head has at least 8 bits.

    none   all weights in the model's dtype
    int8   8 bits in groups of 64, or as stored in the file
    int4   4 bits in groups of 32, or as stored in the file
    auto   keep the file's integers if the kernels can multiply them, convert its other quantised tensors (including
           fp8) to 8 bits, and keep float weights. On a GPU, also keep fp8, and convert tensors without a kernel to the
           model's dtype. Same as none for files without quantised tensors
    """

    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"
    AUTO = "auto"

    def effective(self, *, quantised_file: bool) -> Quantization:
        """Return the mode that applies to a file."""
        return Quantization.NONE if self is Quantization.AUTO and not quantised_file else self

    @property
    def head(self) -> Quantization:
        """Mode of the output head."""
        return Quantization.INT8 if self is Quantization.INT4 else self

    @property
    def keeps_held(self) -> bool:
        """Whether integers of a quantised file may be kept."""
        return self is not Quantization.NONE

    def takes(self, bits: int) -> bool:
        """Whether integers of `bits` bits are kept as stored in the file."""
        return {Quantization.INT8: bits == 8, Quantization.INT4: bits == 4}.get(self, True)

    def bits(self, quantised_in_file: bool) -> int:
        """Return the number of bits that other matrices are quantised to, or 0."""
        if self is Quantization.AUTO:
            return 8 if quantised_in_file else 0
        return {Quantization.INT8: 8, Quantization.INT4: 4}.get(self, 0)
