"""Selection of the backend for a device type. No other module checks for Triton or the native kernels."""

from __future__ import annotations

import logging
from typing import Protocol

from kernels.cpu.backend import NativeBackend, native_backend
from kernels.cpu.recorded_kernels import RecordedKernels
from kernels.device import missing_to_launch
from kernels.interface.kernels import HeldProducts, Kernels
from kernels.plain import backend as plain_backend

logger = logging.getLogger(__name__)


class Backend(Kernels, Protocol):
    """Backend of a device type: operations, and products with weights in a device-specific form.

    Without either kind of products, torch is used.
    """

    @property
    def packing(self) -> NativeBackend | None:
        """Products with packed weights, on a CPU; else None."""
        ...

    @property
    def products(self) -> HeldProducts | None:
        """Products with stored weights, on a GPU whose steps run asynchronously and can be captured; else None."""
        ...


FOUND: dict[str, Backend] = {}
"""Backends by device type, cached. Tests and dry runs insert others before the first computation."""


def backend(kind: str) -> Backend:
    """The backend of a device type."""
    if (found := FOUND.get(kind)) is None:
        found = FOUND.setdefault(kind, look_up(kind))
    return found


def look_up(kind: str) -> Backend:
    """Return the native backend for "cpu", Triton for "cuda", and plain torch otherwise or if these cannot run."""
    if kind == "program":
        return RecordedKernels()
    if kind == "cpu":
        return native_backend() or plain_backend
    if kind != "cuda":
        return plain_backend
    missing = missing_to_launch()
    try:
        import kernels.gpu.backend as found
    except ImportError as error:
        missing = f"Triton ({error})"
    if missing:
        logger.warning("kernels of %s: plain torch (several times slower), missing %s", kind, missing)
        return plain_backend
    logger.info("kernels of %s: Triton", kind)
    return found


def prepare(kind: str) -> None:
    """Compile or load the kernels of a device type, which otherwise happens at the first call."""
    backend(kind)


def has_own_kernels(kind: str) -> bool:
    """Return whether this device type has a backend other than plain torch."""
    return backend(kind) is not plain_backend


def has_device_kernels(kind: str) -> bool:
    """Return whether the kernels run asynchronously to the host, and steps can be captured."""
    return backend(kind).products is not None
