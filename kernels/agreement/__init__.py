"""Compare a device's kernels with plain torch at the shapes of one model. Memory is filled with NaN beforehand."""

from __future__ import annotations

from kernels.agreement.experts import experts_check
from kernels.agreement.gate import Check
from kernels.agreement.products import heads_check, product_check
from kernels.agreement.run import SEED, check_kernels
from kernels.agreement.shape import CheckedShape, LayerRule

__all__ = [
    "Check",
    "CheckedShape",
    "LayerRule",
    "SEED",
    "check_kernels",
    "experts_check",
    "heads_check",
    "product_check",
]
