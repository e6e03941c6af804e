"""The device of kernels under test, and what makes the interpreter do as a chip does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ...interpreter import ON_GPU, ask_for_interpreter

ask_for_interpreter()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda:0" if ON_GPU else "cpu")


@pytest.fixture(autouse=True, scope="session")
def products_by_row() -> Iterator[None]:
    """In the interpreter, the products of a tensor core: a row's sums do not depend on where in the tile it stands.

    numpy's do, in float32, on CPUs with AVX2 and no more: its library takes rows by eights and the last ones otherwise.
    """
    if ON_GPU:
        yield
        return
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if a.data.dtype.itemsize == 1:  # codes of float8, which it knows how to widen
            return plain(self, a, b, d, *precision)
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield
