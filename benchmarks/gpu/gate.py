"""The gate of the timed kernels: outputs and unused cache slots full of NaN, a plain reference beside each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernels.agreement.gate import Poisoned, difference

__all__ = ["difference", "first_problem", "poisoned"]
poisoned = Poisoned


def first_problem(pairs: Sequence[tuple[str, Any, Any]], dtype: torch.dtype) -> str:
    """The first error of (name, actual, expected), with its name, or ""."""
    for name, actual, expected in pairs:
        problem = difference(actual, expected, dtype)
        if problem:
            return f"{name}: {problem}"
    return ""
