"""Is a kernel right? Fresh random inputs, outputs and unused cache slots full of NaN, a plain reference beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill `torch.empty` and `torch.empty_like` with NaN, so that unwritten outputs show."""
    empty, empty_like = torch.empty, torch.empty_like

    def spoil(made: Tensor) -> Tensor:
        return made.fill_(float("nan")) if made.is_floating_point() else made

    with (
        patch.object(torch, "empty", lambda *sizes, **options: spoil(empty(*sizes, **options))),
        patch.object(torch, "empty_like", lambda like, **options: spoil(empty_like(like, **options))),
    ):
        yield


def difference(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> str:
    """The error of `actual`, or "". `expected` is of a wider type; the kernel computed in `dtype`."""
    if actual.shape != expected.shape:
        return f"shape {list(actual.shape)}, not {list(expected.shape)}"
    actual, expected = actual.double(), expected.double()
    strange = int((~torch.isfinite(actual)).sum())
    if strange:
        return f"{strange} of {actual.numel()} numbers are not finite"
    tolerance = TOLERANCE[dtype]
    off = (actual - expected).abs() - tolerance * expected.abs()
    limit = tolerance * max(1.0, float(expected.abs().mean()))
    worst = float(off.max()) if off.numel() else 0.0
    if worst > limit:
        return f"off by {worst:.3g}, {limit:.3g} is allowed"
    # Attention over many keys yields small numbers, of which that limit would not notice a large missing part.
    share = float((actual - expected).norm() / expected.norm()) if expected.any() else 0.0
    return f"off by {share:.2g} of its norm, {tolerance:.2g} is allowed" if share > tolerance else ""


def first_problem(pairs: Sequence[tuple[str, Any, Any]], dtype: torch.dtype) -> str:
    """The first error of (name, actual, expected), with its name, or ""."""
    for name, actual, expected in pairs:
        problem = difference(actual, expected, dtype)
        if problem:
            return f"{name}: {problem}"
    return ""
