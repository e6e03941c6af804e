"""The choices of `--quantization`: how many bits each matrix of a model gets."""

from __future__ import annotations

from enum import StrEnum


class Quantization(StrEnum):
    """Embeddings and norms are never quantised; the output head never below 8 bits.

    none   every weight in the model's dtype
    int8   8 bits, in groups of 64 (or as the file holds them)
    int4   4 bits, in groups of 32 (or as the file holds them)
    auto   what a file holds in integers that the kernels multiply stays so, its other quantised tensors, fp8 included,
           get 8 bits; float weights stay. On a GPU fp8 stays, too, and what no kernel multiplies gets the model's
           dtype. Without any quantised tensor it means none
    """

    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"
    AUTO = "auto"

    def effective(self, *, quantised_file: bool) -> Quantization:
        """The choice that this one means for a file."""
        return Quantization.NONE if self is Quantization.AUTO and not quantised_file else self

    @property
    def head(self) -> Quantization:
        """The choice for the output head."""
        return Quantization.INT8 if self is Quantization.INT4 else self

    @property
    def keeps_held(self) -> bool:
        """Whether the integers of a quantised file may be kept."""
        return self is not Quantization.NONE

    def takes(self, bits: int) -> bool:
        """Whether a file's integers of so many bits are kept."""
        return {Quantization.INT8: bits == 8, Quantization.INT4: bits == 4}.get(self, True)

    def bits(self, quantised_in_file: bool) -> int:
        """Bits that another matrix is quantised to; 0 for none."""
        if self is Quantization.AUTO:
            return 8 if quantised_in_file else 0
        return {Quantization.INT8: 8, Quantization.INT4: 4}.get(self, 0)
