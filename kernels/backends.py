"""Which backend computes on a type of device. Nothing else chooses one, or asks for Triton or the native kernels."""

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
    """All that a type of device computes with: its operations, and the products for weights that it keeps its own way.

    Where it has neither kind of products, torch multiplies.
    """

    @property
    def packing(self) -> NativeBackend | None:
        """Products with weights in the order in which its kernels read them: a CPU's."""
        ...

    @property
    def products(self) -> HeldProducts | None:
        """Products with weights as they are held: a GPU's, whose steps run by themselves and can be recorded."""
        ...


FOUND: dict[str, Backend] = {}
"""By device type, once looked up. Tests and dry runs put others here before anything is computed."""


def backend(kind: str) -> Backend:
    """The backend of a device type."""
    if (found := FOUND.get(kind)) is None:
        found = FOUND.setdefault(kind, look_up(kind))
    return found


def look_up(kind: str) -> Backend:
    """Native on "cpu", Triton on "cuda", plain torch elsewhere or where these cannot run."""
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
        logger.warning("kernels of %s: plain torch, several times slower, for want of %s", kind, missing)
        return plain_backend
    logger.info("kernels of %s: Triton", kind)
    return found


def prepare(kind: str) -> None:
    """Compiles or loads the kernels of a device type; else the first call of one does."""
    backend(kind)


def has_own_kernels(kind: str) -> bool:
    """Whether this device type has more than plain torch."""
    return backend(kind) is not plain_backend


def has_device_kernels(kind: str) -> bool:
    """Whether its kernels run by themselves, behind the host, and steps of them can be recorded."""
    return backend(kind).products is not None
