"""The device of kernels under test, and what makes the interpreter do as a chip does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from benchmarks.gpu.interpreter import products_by_row

from ...interpreter import ON_GPU, ask_for_interpreter

ask_for_interpreter()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda:0" if ON_GPU else "cpu")


@pytest.fixture(autouse=True, scope="session")
def rows_of_products_on_their_own() -> Iterator[None]:
    """In the interpreter, as on a tensor core."""
    with nullcontext() if ON_GPU else products_by_row():
        yield
