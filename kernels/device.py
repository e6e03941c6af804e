"""Which devices Triton's kernels serve."""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

logger = logging.getLogger(__name__)


@functools.cache
def triton_backend(kind: str) -> ModuleType | None:
    """`kernels.triton_backend` for device type "cuda", or None where Triton is not installed or not made for it."""
    if kind != "cuda":
        return None
    try:
        found = importlib.import_module("diptych.kernels.triton_backend")
    except ImportError as error:
        logger.warning("kernels of %s: plain torch, several times slower, for want of Triton (%s)", kind, error)
        return None
    logger.info("kernels of %s: Triton", kind)
    return found
