"""GPU KV memory that its owner exports to other processes of the same user, and their mappings of it.

The memory is passed as a file descriptor over an abstract Unix socket. Opening the descriptor through /proc, as for
memory files, would open the driver's device instead of the memory. pidfd_getfd requires ptrace rights, which containers
do not have.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import struct
import sys
import threading
import time
import weakref
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from common.engine.kv.cuda_driver import CudaDriver, DescriptorError, DriverError, driver

log = logging.getLogger(__name__)
WAIT_S = 1.0
"""Timeout of either side, in seconds. The owner has a dedicated thread, so it answers at once."""
BACKLOG = 64
"""Pending connections: more than the number of workers on a host."""
_WHO = struct.Struct("3i")  # ucred of a peer: process, user, group


class KVDevice(msgspec.Struct, frozen=True, array_like=True):
    """Offer of GPU memory to workers of the same host.

    Process `pid` passes a descriptor of its `num_bytes` of GPU memory to processes of the same user that present the
    secret `name`.
    """

    pid: Annotated[int, Meta(ge=1, lt=2**31)]
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    num_bytes: Annotated[int, Meta(ge=1, le=2**50)]


class DeviceMap:
    """Mapping of memory into a device's address space, unmapped with the last reference to this object.

    numpy and torch create arrays over it without a copy, through the array-interface attributes.
    """

    def __init__(self, cuda: CudaDriver, handle: int, num_bytes: int, device: int, *, read_only: bool) -> None:
        """`num_bytes` is in whole pages. The caller still owns the handle. Raises DriverError."""
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
            with contextlib.suppress(DriverError):  # at process exit the driver may already be shut down
                self._cuda.unmap(self.address, self.num_bytes)


class ExportedMemory:
    """Owner side of exported GPU memory, offered until `close` or the last reference to this object is gone.

    The initial contents are undefined.
    """

    def __init__(self, num_bytes: int, device: int) -> None:
        """Raises DriverError, or DescriptorError if the system cannot pass descriptors."""
        if sys.platform != "linux":
            raise DescriptorError(f"{sys.platform} does not support descriptors of GPU memory")
        cuda = driver()
        size = cuda.whole_pages(num_bytes, device)
        handle = cuda.create(size, device)
        try:
            self.map = DeviceMap(cuda, handle, size, device, read_only=False)
            descriptor = cuda.export(handle)
        finally:
            cuda.release(handle)  # the mapping and the descriptor keep the memory alive
        try:
            given = DescriptorServer(descriptor)
        except OSError as error:
            raise DescriptorError(f"cannot offer GPU memory to other processes: {error}") from error
        self.offer = KVDevice(os.getpid(), given.name, size)
        self._end = weakref.finalize(self, given.close)  # its thread and descriptor would keep the memory alive

    def close(self) -> None:
        """Stop offering the memory. Existing mappings remain valid."""
        self._end()


def map_exported(offer: KVDevice, device: int) -> DeviceMap:
    """Map another process's `ExportedMemory` for `device`, read-only where the driver supports that.

    Raises DriverError, or DescriptorError if the owner does not pass its descriptor.
    """
    cuda = driver()
    descriptor = receive_descriptor(offer.name, offer.pid)
    try:
        handle = cuda.take(descriptor)
    finally:
        os.close(descriptor)
    try:
        return DeviceMap(cuda, handle, offer.num_bytes, device, read_only=True)
    finally:
        cuda.release(handle)


class DescriptorServer:
    """Passes `descriptor` to each process of this user that asks, from a dedicated thread, until `close`."""

    def __init__(self, descriptor: int) -> None:
        """Takes ownership of the descriptor, even if it raises OSError."""
        self._descriptor, self._closed = descriptor, False
        self.name = f"diptych-kv-{secrets.token_hex(16)}"
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind(_address(self.name))
            self._socket.listen(BACKLOG)
        except OSError:
            os.close(descriptor)
            raise
        self._thread = threading.Thread(target=self._main, name="kv-descriptor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):  # the thread has already ended
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread is not threading.current_thread():  # garbage is collected on any thread
            self._thread.join(2 * WAIT_S)
        self._socket.close()
        os.close(self._descriptor)

    def _main(self) -> None:
        while not self._closed:
            try:
                peer, _ = self._socket.accept()
            except OSError as error:
                if not self._closed:  # for example out of file descriptors, which may be temporary
                    log.warning(
                        "cannot accept requests of other workers on this host for GPU memory: %s; retrying in %g s",
                        *(error, WAIT_S),
                    )
                    time.sleep(WAIT_S)
                continue
            with peer:
                try:
                    self._give(peer)
                except OSError as error:
                    log.warning("did not share GPU memory with a worker on this host: %s", error)

    def _give(self, peer: socket.socket) -> None:
        peer.settimeout(WAIT_S)
        process, user = _who(peer)
        if user != os.geteuid():
            raise PermissionError(f"process {process} belongs to user {user}, not {os.geteuid()}")
        socket.send_fds(peer, [b"\0"], [self._descriptor])


def receive_descriptor(name: str, process: int) -> int:
    """Receive the descriptor that `process` offers under `name`. The caller must close it. Raises DescriptorError."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(WAIT_S)
            asking.connect(_address(name))
            if (giver := _who(asking)) != (process, os.geteuid()):
                raise DescriptorError(f"process {giver[0]} of user {giver[1]} answered instead of process {process}")
            _, descriptors, _, _ = socket.recv_fds(asking, 1, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise DescriptorError(f"cannot receive the memory descriptor of process {process}: {error}") from error
    if not descriptors:
        raise DescriptorError(f"process {process} did not pass its memory descriptor to this user")
    return descriptors[0]


def _address(name: str) -> bytes:
    """Return the address in the abstract namespace, which is per host, or per pod with its own network."""
    return b"\0" + name.encode()


def _who(peer: socket.socket) -> tuple[int, int]:
    """Return the process and user IDs of the peer."""
    process, user, _ = _WHO.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _WHO.size))
    return process, user
