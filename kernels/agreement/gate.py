"""Compare kernel outputs with a reference. Output memory is filled with NaN beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kernels.device import too_large

TOLERANCE = {
    **{torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3},
    **{torch.float8_e4m3fn: 0.13, torch.int8: 4e-2},
}
"""Tolerance by result type, both per element and relative to the norm of the whole result. With 8 bits, the last bit
may round either way: 1/8 of an e4m3 number, or 1/127 of the largest element of an int8 key."""
NEW_MEMORY = (torch.empty, torch.empty_like, torch.Tensor.new_empty)


class Poisoned(TorchFunctionMode):
    """Fills tensors that this thread creates with `torch.empty` with NaN, to detect unwritten outputs."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in NEW_MEMORY and made.is_floating_point():
            made.fill_(float("nan"))
        return made


class Difference(NamedTuple):
    """Result of a comparison.

    largest: largest absolute difference. share: norm of the difference relative to the norm of the expected result.
    wrong: description of the error, or "".
    """

    largest: float
    share: float
    tolerance: float
    wrong: str = ""


def compared(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> Difference:
    """Compare `actual`, computed in `dtype`, with `expected`, of a wider type."""
    tolerance = TOLERANCE[dtype]
    if actual.shape != expected.shape:
        found = f"shape {list(actual.shape)}, not {list(expected.shape)}"
        return Difference(float("inf"), float("inf"), tolerance, found)
    actual, expected = actual.double(), expected.double()
    strange = int((~torch.isfinite(actual)).sum())
    if strange:
        found = f"{strange} of {actual.numel()} numbers are not finite"
        return Difference(float("inf"), float("inf"), tolerance, found)
    if not actual.numel():
        return Difference(0.0, 0.0, tolerance)
    off = (actual - expected).abs()
    largest = float(off.max())
    # Attention over many keys yields small elements. A limit per element would not detect that a large part is missing.
    norm = float(expected.norm())
    share = float((actual - expected).norm()) / norm if norm else 0.0
    limit = tolerance * max(1.0, float(expected.abs().mean()))
    worst = float((off - tolerance * expected.abs()).max())
    if worst > limit:
        found = f"off by {largest:.3g}, {limit + largest - worst:.3g} is allowed there"
        return Difference(largest, share, tolerance, found)
    found = f"off by {share:.2g} of its norm, {tolerance:.2g} is allowed" if share > tolerance else ""
    return Difference(largest, share, tolerance, found)


def difference(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> str:
    """Describe the error of `actual`; "" if it is within the tolerance."""
    return compared(actual, expected, dtype).wrong


class Finding(NamedTuple):
    """Result for one kernel at one shape. `largest` is the largest difference; `problem` describes the error, or ""."""

    kernel: str
    shape: str
    largest: float
    tolerance: float
    problem: str

    @classmethod
    def of_failure(cls, kernel: str, error: Exception) -> Finding:
        """Create the finding of a kernel that does not compile or raises an error."""
        words = (str(error).strip().splitlines() or ["no message"])[0]
        problem = too_large(error) or f"{type(error).__name__}: {words[:300]}"
        return cls(kernel, "the first failed shape", float("inf"), 0.0, problem)

    def __str__(self) -> str:
        words = self.problem or "agrees"
        numbers = f"largest difference {self.largest:.3g}, tolerance {self.tolerance:g}"
        return f"{self.kernel} ({self.shape}): {words}; {numbers}"


def finding(kernel: str, shape: str, pairs: Sequence[tuple[str, Tensor, Tensor, torch.dtype]]) -> Finding:
    """Compare pairs (name, actual, expected, type). Reports the first failure, or else the largest difference."""
    found = [(name, compared(actual, expected, dtype)) for name, actual, expected, dtype in pairs]
    name, worst = next(((n, d) for n, d in found if d.wrong), max(found, key=lambda pair: pair[1].largest))
    problem = f"{name}: {worst.wrong}" if worst.wrong else ""
    return Finding(kernel, shape, worst.largest, worst.tolerance, problem)


Check = Callable[[], Finding]
