"""A GPU's KV memory that its owner exports, and the map of it in a worker whose GPU reads it."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from common.engine.kv.cuda_driver import CudaDriver, DriverError, driver
from common.engine.kv.device_descriptor import GivenDescriptor, NotGiven, take_descriptor
from common.engine.kv.reached import Reached
from common.errors import DiptychError
from common.wire.messages import KVDevice


class DeviceMap:
    """Memory in the address space of a device, unmapped with the last reference to this.

    numpy and torch make arrays of it without a copy, which refer to it: their common interface is of attributes.
    """

    def __init__(self, cuda: CudaDriver, handle: int, num_bytes: int, device: int, *, read_only: bool) -> None:
        """`num_bytes` in whole pages. The handle stays the caller's. Raises DriverError."""
        self._cuda, self.num_bytes = cuda, num_bytes
        self.address = cuda.map(handle, num_bytes, device, read_only=read_only)
        self.__array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }
        self.__cuda_array_interface__ = self.__array_interface__

    def __del__(self) -> None:
        if hasattr(self, "address"):
            with contextlib.suppress(DriverError):  # as a process ends, the driver may have ended before
                self._cuda.unmap(self.address, self.num_bytes)


class ExportedMemory:
    """The owner's side. What is in it at first is not known."""

    def __init__(self, num_bytes: int, device: int) -> None:
        """Raises DriverError, NotGiven where the system gives no descriptors."""
        if sys.platform != "linux":
            raise NotGiven(f"{sys.platform} gives no descriptors of GPU memory")
        cuda = driver()
        size = cuda.whole_pages(num_bytes, device)
        handle = cuda.create(size, device)
        try:
            self.map = DeviceMap(cuda, handle, size, device, read_only=False)
            descriptor = cuda.export(handle)
        finally:
            cuda.release(handle)  # the map and the descriptor keep the memory
        try:
            self._given = GivenDescriptor(descriptor)
        except OSError as error:
            raise NotGiven(f"GPU memory cannot be given to other processes: {error}") from error
        self.offer = KVDevice(os.getpid(), self._given.name, size)

    def close(self) -> None:
        """No other process gets the memory any more. Those that map it keep it."""
        self._given.close()


class ImportedMemory:
    """The reader's side: mapped for its own device until `close` or the owner's death.

    `process` is a file descriptor that turns readable when the owner has died. `reached` has this worker's device copy
    blocks out of it; set before the first one.
    """

    is_ring = False
    reached: Reached

    def __init__(self, offer: KVDevice, device: int) -> None:
        """Raises DriverError, and NotGiven unless the process that offers it gives it to this one."""
        if sys.platform != "linux":
            raise NotGiven(f"{sys.platform} gives no descriptors of GPU memory")
        self.offer = offer
        try:
            self.process = os.pidfd_open(offer.pid)
        except (OSError, AttributeError) as error:
            raise NotGiven(f"process {offer.pid} is not on this host, or hidden: {error}") from error
        try:
            self._map = _mapped(offer, device)
        except DiptychError:
            os.close(self.process)
            raise
        self.closed = False

    @property
    def address(self) -> int:
        """Where the owner's first block is."""
        return self._map.address

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self.process)
            self.reached.close()
            del self._map  # unmapped now


def _mapped(offer: KVDevice, device: int) -> DeviceMap:
    cuda = driver()
    descriptor = take_descriptor(offer.name, offer.pid)
    try:
        handle = cuda.take(descriptor)
    finally:
        os.close(descriptor)
    try:
        return DeviceMap(cuda, handle, offer.num_bytes, device, read_only=True)
    finally:
        cuda.release(handle)
