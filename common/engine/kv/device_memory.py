"""A GPU's KV memory that its owner exports to other processes of its user, and their maps of it.

The memory travels as a file descriptor, over a socket without a name in any file system. Opening the descriptor through
/proc, as memory files are, would open the driver's device and not the memory; and the system call that copies
descriptors out of another process (pidfd_getfd) asks for the rights of a debugger, which containers lack.
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
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from common.engine.kv.cuda_driver import CudaDriver, DriverError, NotGiven, driver

log = logging.getLogger(__name__)
WAIT_S = 1.0
"""How long either side waits for the other: the giver does nothing else, so it answers at once."""
BACKLOG = 64
"""Processes that may ask at once: more than a host has workers."""
_WHO = struct.Struct("3i")  # of a peer: process, user, group


class KVDevice(msgspec.Struct, frozen=True, array_like=True):
    """Where a GPU of the same host reads a worker's blocks: process `pid` gives a descriptor of its GPU's memory,
    `num_bytes` in all, to processes of its user that ask for `name`, a secret.
    """

    pid: Annotated[int, Meta(ge=1, lt=2**31)]
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    num_bytes: Annotated[int, Meta(ge=1, le=2**50)]


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


def map_exported(offer: KVDevice, device: int) -> DeviceMap:
    """Map another process's `ExportedMemory` for this process's `device`, read-only where the driver supports that.

    Raises DriverError, and NotGiven unless the process that offers it gives it to this one.
    """
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


class GivenDescriptor:
    """Gives `descriptor` to each process of this user that asks, from a thread of its own, until `close`."""

    def __init__(self, descriptor: int) -> None:
        """Owns the descriptor from now on, also when it raises OSError."""
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
        with contextlib.suppress(OSError):  # the thread has ended already
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes it
        self._thread.join(2 * WAIT_S)
        self._socket.close()
        os.close(self._descriptor)

    def _main(self) -> None:
        while not self._closed:
            try:
                peer, _ = self._socket.accept()
            except OSError as error:
                if not self._closed:  # as without a free descriptor: later there may be one
                    log.warning("no worker of this host gets access to this one's GPU memory now: %s", error)
                    time.sleep(WAIT_S)
                continue
            with peer:
                try:
                    self._give(peer)
                except OSError as error:
                    log.warning("a worker of this host got no access to this one's GPU memory: %s", error)

    def _give(self, peer: socket.socket) -> None:
        peer.settimeout(WAIT_S)
        process, user = _who(peer)
        if user != os.geteuid():
            raise PermissionError(f"process {process} is user {user}'s, not {os.geteuid()}'s")
        socket.send_fds(peer, [b"\0"], [self._descriptor])


def take_descriptor(name: str, process: int) -> int:
    """The descriptor that `process` gives under this name, the caller's to close. Raises NotGiven."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(WAIT_S)
            asking.connect(_address(name))
            if (giver := _who(asking)) != (process, os.geteuid()):
                raise NotGiven(f"process {giver[0]} of user {giver[1]} answers for process {process}")
            _, descriptors, _, _ = socket.recv_fds(asking, 1, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise NotGiven(f"process {process} gives no descriptor of its memory: {error}") from error
    if not descriptors:
        raise NotGiven(f"process {process} gives no descriptor of its memory to this user")
    return descriptors[0]


def _address(name: str) -> bytes:
    """In the abstract namespace, which is the host's, or the pod's where that has a network of its own."""
    return b"\0" + name.encode()


def _who(peer: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    process, user, _ = _WHO.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _WHO.size))
    return process, user
