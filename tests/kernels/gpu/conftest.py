"""Where the kernels run: on the CUDA device if there is one, else in Triton's interpreter on CPU tensors.

The interpreter must be asked for before Triton is first imported; nothing that the other tests import does that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

ON_GPU = torch.cuda.is_available()
if ON_GPU:  # new memory is full of NaN in deterministic mode only, in which torch's products may ask for this
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
else:
    os.environ["TRITON_INTERPRET"] = "1"
    if "triton" in sys.modules and not sys.modules["triton"].knobs.runtime.interpret:
        raise RuntimeError("Triton was imported before its interpreter was asked for")


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
