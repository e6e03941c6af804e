"""Where the kernels run: on the CUDA device if there is one, else in Triton's interpreter on CPU tensors.

The interpreter must be asked for before Triton is first imported; nothing that the other tests import does that.
"""

from __future__ import annotations

import os
import sys

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
