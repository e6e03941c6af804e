"""A man in the middle of every ZeroMQ connection of a stack, who understands the messages and mistreats some.

router ── control ──> proxy ──> worker          prefill worker ── KV ──> proxy ──> decode worker

Routers get the proxy's address for each worker (`StackSettings(via=proxy.control)`). Workers get it for each other, to
send KV and to pull it, because the proxy writes it into the `WorkerHello` that passes through.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from queue import Empty, SimpleQueue
from typing import Any, Self

import msgspec
import zmq

from benchmarks.stack import StackProcess
from common.errors import WireError
from common.wire.codec import decode, encode
from common.wire.messages import AnyMessage, KVBlocks, Message, WorkerHello

# What can happen to a message on its way, as rules that a `WireProxy` carries out.

DELAY_S = 0.3


class Fault(StrEnum):
    DROP = "drop"
    DELAY = "delay"
    DUPLICATE = "duplicate"
    REORDER = "reorder"  # it leaves after the message behind it
    TRUNCATE = "truncate"  # the second half is missing
    FLIP = "flip"  # one bit is another
    LOSE_FRAME = "lose frame"  # of KV blocks: the last one
    FLIP_FRAME = "flip frame"  # of KV blocks: a bit in the last one


FRAME_FAULTS = (Fault.LOSE_FRAME, Fault.FLIP_FRAME)


@dataclass
class Rule:
    """Does `fault` to messages of one kind: to `times` of them, after letting `skip` pass.

    `where` narrows the kind down. `struck` counts the messages it was done to. One rule is used by one proxy.
    """

    kind: type[Message]
    fault: Fault
    times: int = 1
    skip: int = 0
    delay_s: float = DELAY_S
    where: Callable[[Message], bool] = lambda message: True
    seed: int = 0
    seen: int = 0
    struck: int = 0
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def takes(self, message: Message) -> bool:
        """Whether this message is to suffer; counts it."""
        if not isinstance(message, self.kind) or not self.where(message) or self.struck >= self.times:
            return False
        self.seen += 1
        if self.seen <= self.skip:
            return False
        if self.fault in FRAME_FAULTS and (not isinstance(message, KVBlocks) or message.sources):
            return False
        self.struck += 1
        return True

    def spoil(self, frames: list[bytes]) -> list[bytes]:
        """The message as it arrives after a truncation or a flipped bit."""
        head, *blocks = frames
        match self.fault:
            case Fault.TRUNCATE:
                return [head[: len(head) // 2], *blocks]
            case Fault.FLIP:
                return [self._flipped(head), *blocks]
            case Fault.LOSE_FRAME:
                return frames[:-1]
            case Fault.FLIP_FRAME:
                return [*frames[:-1], self._flipped(frames[-1])]
            case _:
                return frames

    def _flipped(self, data: bytes) -> bytes:
        bit = self._random.randrange(8 * len(data))
        spoiled = bytearray(data)
        spoiled[bit // 8] ^= 1 << bit % 8
        return bytes(spoiled)


log = logging.getLogger(__name__)

POLL_MS = 5
CALL_TIMEOUT_S = 10.0
MAX_HELD_S = 0.5
"""A message that waits for the one behind it leaves after this time, if none comes."""

Send = Callable[[list[bytes]], None]


@dataclass
class Link:
    """One address of a worker: its peers connect to `front`, and each has a connection of its own behind it."""

    target: str
    is_control: bool
    front: zmq.Socket[bytes]
    address: str
    backs: dict[bytes, zmq.Socket[bytes]] = field(default_factory=dict)


@dataclass
class _Held:
    """A message that leaves after the next one of its direction, or at `until`."""

    send: Send
    frames: list[bytes]
    until: float


class WireProxy:
    """Owns a thread and all its sockets. `control`, `inject`, `clear` and `cut` may be called from any thread."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._links: dict[str, Link] = {}
        self._of_socket: dict[zmq.Socket[bytes], tuple[Link, bytes]] = {}
        self._rules: list[Rule] = []
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._later: list[tuple[float, int, Send, list[bytes]]] = []
        self._held: dict[tuple[zmq.Socket[bytes], bytes], _Held] = {}
        self._serial = itertools.count()
        self.num_passed: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._main, name="wire-proxy")
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join()
        self._context.destroy(linger=0)

    def control(self, worker: StackProcess) -> str:
        """Where routers reach a worker through this proxy."""
        return self._call(lambda: self._link(worker.addresses["address"], is_control=True).address)

    def inject(self, rule: Rule) -> Rule:
        self._call(lambda: self._rules.append(rule))
        return rule

    def clear(self) -> None:
        """Forget all rules; what is delayed still arrives."""
        self._call(self._rules.clear)

    def cut(self, worker: StackProcess) -> None:
        """Break the routers' connections to a worker; they connect again at once."""
        self._call(lambda: self._cut(self._links[worker.addresses["address"]]))

    # ------------------------------------------------------------ the thread

    def _call(self, work: Callable[[], Any]) -> Any:
        done: Future[Any] = Future()
        self._calls.put((work, done))
        return done.result(CALL_TIMEOUT_S)

    def _main(self) -> None:
        while self._take_calls():
            for socket, _ in self._poller.poll(POLL_MS):
                self._receive(socket)
            self._send_late(time.monotonic())

    def _take_calls(self) -> bool:
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return True
            if call is None:
                return False
            work, done = call
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

    def _link(self, target: str, *, is_control: bool) -> Link:
        link = self._links.get(target)
        if link is None:
            front, address = self._bind("tcp://127.0.0.1:*")
            link = self._links[target] = Link(target, is_control, front, address)
            self._watch(front, link, b"")
        return link

    def _bind(self, address: str) -> tuple[zmq.Socket[bytes], str]:
        front = self._context.socket(zmq.ROUTER)
        front.set(zmq.ROUTER_HANDOVER, 1)
        front.set(zmq.SNDHWM, 0)
        front.set(zmq.RCVHWM, 0)
        try:
            front.bind(address)
        except zmq.ZMQError:
            front.close(linger=0)
            raise
        return front, front.get_string(zmq.LAST_ENDPOINT)

    def _cut(self, link: Link) -> None:
        self._drop(link.front)
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while True:
            try:
                link.front, _ = self._bind(link.address)
                break
            except zmq.ZMQError:  # the old socket's thread has not released the port yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)
        self._watch(link.front, link, b"")

    def _watch(self, socket: zmq.Socket[bytes], link: Link, peer: bytes) -> None:
        self._poller.register(socket, zmq.POLLIN)
        self._of_socket[socket] = (link, peer)

    def _drop(self, socket: zmq.Socket[bytes]) -> None:
        self._poller.unregister(socket)
        del self._of_socket[socket]
        self._held = {key: held for key, held in self._held.items() if key[0] is not socket}
        socket.close(linger=0)

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        found = self._of_socket.get(socket)
        if found is None:  # cut meanwhile
            return
        link, peer = found
        while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            frames = socket.recv_multipart()
            if socket is link.front:
                peer, *frames = frames
                back = link.backs.get(peer) or self._connect(link, peer)
                self._pass(frames, (back, peer), lambda out, back=back: _send(back, out))
            else:
                self._pass(frames, (link.front, peer), lambda out, peer=peer: _send(link.front, [peer, *out]))

    def _connect(self, link: Link, peer: bytes) -> zmq.Socket[bytes]:
        """The peer's own connection to the worker, under the name that the peer gave itself."""
        back = self._context.socket(zmq.DEALER)
        if link.is_control:
            back.set(zmq.ROUTING_ID, peer)
        back.set(zmq.SNDHWM, 0)
        back.set(zmq.RCVHWM, 0)
        back.set(zmq.RECONNECT_IVL, 20)
        back.connect(link.target)
        link.backs[peer] = back
        self._watch(back, link, peer)
        return back

    def _pass(self, frames: list[bytes], direction: tuple[zmq.Socket[bytes], bytes], send: Send) -> None:
        message = self._parse(frames)
        if isinstance(message, WorkerHello):
            message = msgspec.structs.replace(
                message, kv_address=self._between(message.kv_address), lend_address=self._between(message.lend_address)
            )
            frames = [encode(message)]
        self.num_passed[type(message).__name__] += 1
        rule = next((rule for rule in self._rules if message is not None and rule.takes(message)), None)
        before = self._held.pop(direction, None)
        self._suffer(rule, frames, direction, send)
        if before is not None:
            before.send(before.frames)

    def _between(self, address: str) -> str:
        """Where peers reach a worker's socket for KV through this proxy; "" for a worker without that socket."""
        return self._link(address, is_control=False).address if address else ""

    def _suffer(
        self, rule: Rule | None, frames: list[bytes], direction: tuple[zmq.Socket[bytes], bytes], send: Send
    ) -> None:
        match rule.fault if rule is not None else None:
            case None:
                send(frames)
            case Fault.DROP:
                pass
            case Fault.DELAY:
                assert rule is not None
                heapq.heappush(self._later, (time.monotonic() + rule.delay_s, next(self._serial), send, frames))
            case Fault.DUPLICATE:
                send(frames)
                send(frames)
            case Fault.REORDER:
                self._held[direction] = _Held(send, frames, time.monotonic() + MAX_HELD_S)
            case _:
                assert rule is not None
                send(rule.spoil(frames))

    def _send_late(self, now: float) -> None:
        while self._later and self._later[0][0] <= now:
            _, _, send, frames = heapq.heappop(self._later)
            send(frames)
        for direction in [key for key, held in self._held.items() if held.until <= now]:
            held = self._held.pop(direction)
            held.send(held.frames)

    @staticmethod
    def _parse(frames: list[bytes]) -> AnyMessage | None:
        try:
            return decode(frames[0]) if frames else None
        except WireError:
            return None


def _send(socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
    """Send without waiting; what cannot be sent is lost, as on any wire."""
    try:
        if not socket.closed:
            socket.send_multipart(frames, zmq.NOBLOCK)
    except zmq.ZMQError as error:
        log.warning("the proxy lost a message: %s", error)
