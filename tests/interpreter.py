"""Where Triton's kernels run in tests: on the CUDA device if there is one, else in Triton's interpreter on CPU tensors.

The interpreter must be asked for before Triton is first imported: by the conftest of each folder whose tests import it.
"""

from __future__ import annotations

import os
import sys

import torch

ON_GPU = torch.cuda.is_available()


def ask_for_interpreter() -> None:
    """Unless there is a GPU. Raises RuntimeError when it is too late."""
    if ON_GPU:  # new memory is full of NaN in deterministic mode only, in which torch's products may ask for this
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        return
    os.environ["TRITON_INTERPRET"] = "1"
    if "triton" in sys.modules and not sys.modules["triton"].knobs.runtime.interpret:
        raise RuntimeError("Triton was imported before its interpreter was asked for")
