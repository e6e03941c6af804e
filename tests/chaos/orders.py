"""Orders to change roles, given to a worker by one more router that it knows: the test."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio

from benchmarks.stack import StackProcess
from common.wire.codec import decode, encode
from common.wire.messages import ChangeRole, Message, RouterHello, WorkerHeartbeat, WorkerHello

GREET_MS = 500
"""A worker that was frozen has forgotten its routers, and says nothing until it is greeted again."""
ANSWER_S = 90.0


class Orders:
    """The control connection to one worker."""

    def __init__(self, worker: StackProcess, socket: zmq.asyncio.Socket) -> None:
        self._worker, self._socket = worker, socket
        self._hello = RouterHello(router_id="storm", epoch=time.monotonic_ns())
        self._has_drained = False

    async def change(self, role: str) -> None:
        """Order a change, and wait until the worker has begun it."""
        await self._tell(self._hello)
        await self._tell(ChangeRole(role="prefill" if role == "prefill" else "decode", reason="a storm"))
        await self._until(role, has_begun=True)

    async def obeyed(self, role: str) -> bool:
        """Wait for the end of a change; False when the worker stayed what it was, because requests were left."""
        return await self._until(role, has_begun=False)

    async def _until(self, role: str, *, has_begun: bool) -> bool:
        """Whether the worker has the role, at the end of its drain or once it drains."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            self._worker.check(deadline, f"did not say whether it became a {role} worker")
            if not await self._socket.poll(GREET_MS):
                await self._tell(self._hello)
                continue
            message = decode(await self._socket.recv())
            if isinstance(message, WorkerHello) and message.role == role:
                return True
            if isinstance(message, WorkerHeartbeat):
                self._has_drained |= message.draining
                if self._has_drained and message.draining == has_begun:
                    return False

    async def _tell(self, message: Message) -> None:
        await self._socket.send(encode(message))


@asynccontextmanager
async def orders_to(worker: StackProcess) -> AsyncIterator[Orders]:
    """A connection that ends with the block."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(worker.addresses["address"])
        yield Orders(worker, socket)
