"""CUDA driver bindings for shared GPU memory: virtual memory management, which torch does not expose.

The memory is exported as a file descriptor. It lives as long as any handle or mapping exists (`cuMemRelease` in the
driver's documentation), so a mapping outlives the process that allocated the memory.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Final

from common.errors import DiptychError

LIBRARY: Final = "libcuda.so.1"
PINNED, ON_DEVICE, FILE_DESCRIPTOR = 1, 1, 1
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE and CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR."""
MAY_READ, MAY_WRITE = 1, 3
"""CU_MEM_ACCESS_FLAGS_PROT_..."""
EXPORTS_DESCRIPTORS = 103
"""CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED."""


class DriverError(DiptychError):
    """The driver is missing or rejected a call. The message gives the reason."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("for_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_ADDRESS, _SIZE, _HANDLE, _FLAGS = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
CALLS: Final = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGetAttribute": (_POINTER, _INT, _INT),
    "cuGetErrorString": (_INT, _POINTER),
    "cuMemGetAllocationGranularity": (_POINTER, _POINTER, _INT),
    "cuMemCreate": (_POINTER, _SIZE, _POINTER, _FLAGS),
    "cuMemExportToShareableHandle": (_POINTER, _HANDLE, _INT, _FLAGS),
    "cuMemImportFromShareableHandle": (_POINTER, _POINTER, _INT),
    "cuMemRelease": (_HANDLE,),
    "cuMemAddressReserve": (_POINTER, _SIZE, _SIZE, _ADDRESS, _FLAGS),
    "cuMemAddressFree": (_ADDRESS, _SIZE),
    "cuMemMap": (_ADDRESS, _SIZE, _SIZE, _HANDLE, _FLAGS),
    "cuMemUnmap": (_ADDRESS, _SIZE),
    "cuMemSetAccess": (_ADDRESS, _SIZE, _POINTER, _SIZE),
    "cuMemcpyAsync": (_ADDRESS, _ADDRESS, _SIZE, _POINTER),
}
"""Argument types, as in cuda.h. Each function returns 0 or an error code."""


class DescriptorError(DiptychError):
    """A descriptor cannot be received from, or offered to, another process. The message gives the reason."""


class CudaDriver:
    """Thread-safe. The context of the device must be current, as torch makes it."""

    def __init__(self) -> None:
        """Raises DriverError."""
        try:
            self._library = ctypes.CDLL(LIBRARY)
            for name, arguments in CALLS.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, ctypes.c_int
        except (OSError, AttributeError) as error:
            raise DriverError(f"cannot load the CUDA driver: {error}") from error
        self._call("cuInit", 0)

    def check(self, device: int) -> None:
        """Raise DriverError unless memory of this device can be exported."""
        exports = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(exports), EXPORTS_DESCRIPTORS, device)
        if not exports.value:
            raise DriverError(f"the driver cannot export memory of cuda:{device} as a file descriptor")

    def whole_pages(self, num_bytes: int, device: int) -> int:
        """Round `num_bytes` up to the device's allocation granularity."""
        page = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(page), ctypes.byref(_properties(device)), 0)
        return -(-num_bytes // page.value) * page.value

    def create(self, num_bytes: int, device: int) -> int:
        """Allocate memory in whole pages and return its handle."""
        handle = ctypes.c_uint64()
        self._call("cuMemCreate", ctypes.byref(handle), num_bytes, ctypes.byref(_properties(device)), 0)
        return handle.value

    def export(self, handle: int) -> int:
        """Return a file descriptor of the memory. The caller must close it."""
        descriptor = ctypes.c_int(-1)
        self._call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, FILE_DESCRIPTOR, 0)
        return descriptor.value

    def take(self, descriptor: int) -> int:
        """Return a handle of another process's memory. The caller still owns the descriptor."""
        handle = ctypes.c_uint64()
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), FILE_DESCRIPTOR)
        return handle.value

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def map(self, handle: int, num_bytes: int, device: int, *, read_only: bool = False) -> int:
        """Map the memory for `device` and return its address. Read-only where the driver supports such mappings."""
        address = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), num_bytes, 0, 0, 0)
        try:
            self._call("cuMemMap", address, num_bytes, 0, handle, 0)
        except DriverError:
            self._call("cuMemAddressFree", address, num_bytes)
            raise
        try:
            self._allow(address.value, num_bytes, device, read_only=read_only)
        except DriverError:
            self.unmap(address.value, num_bytes)
            raise
        return address.value

    def unmap(self, address: int, num_bytes: int) -> None:
        self._call("cuMemUnmap", address, num_bytes)
        self._call("cuMemAddressFree", address, num_bytes)

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Copy between two addresses that the current device can access, in stream order."""
        self._call("cuMemcpyAsync", target, source, num_bytes, stream)

    def _allow(self, address: int, num_bytes: int, device: int, *, read_only: bool) -> None:
        kinds = (MAY_READ, MAY_WRITE) if read_only else (MAY_WRITE,)
        for kind in kinds:
            access = _Access(_Location(ON_DEVICE, device), kind)
            try:
                self._call("cuMemSetAccess", address, num_bytes, ctypes.byref(access), 1)
            except DriverError:
                if kind == kinds[-1]:
                    raise
            else:
                return

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._library, name)(*arguments):
            words = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(words))
            raise DriverError(f"{name}: {(words.value or b'unknown error').decode()} ({code})")


def _properties(device: int) -> _Properties:
    return _Properties(PINNED, FILE_DESCRIPTOR, _Location(ON_DEVICE, device))


@functools.cache
def driver() -> CudaDriver:
    """The driver of this process. Raises DriverError."""
    return CudaDriver()
