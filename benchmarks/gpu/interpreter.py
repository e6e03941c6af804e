"""Makes Triton's interpreter multiply each row independently, as a tensor core does, for checks of equal bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np


@contextmanager
def products_by_row() -> Iterator[None]:
    """Compute the interpreter's products in float64, so that a row's sums do not depend on its position in a tile.

    In float32 they do in numpy, with OpenBLAS's kernels for AMD's CPUs and for Intel's without AVX-512.
    """
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if a.data.dtype.itemsize == 1:  # float8 codes, which it can convert
            return plain(self, a, b, d, *precision)
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    with patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot):
        yield
