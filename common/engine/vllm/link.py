"""Link between a worker process and the connectors in its vLLM engine: the ranks and the scheduler.

The worker binds one ROUTER socket, over ipc or TCP. Every rank, and the scheduler in the engine core process, connects
with `WorkerLink`. Each message is authenticated with a secret that the worker generates at start and passes in
`kv_connector_extra_config`, so strangers can neither read orders nor inject messages of a rank.

    worker ── Expect, Admit, Forget, Done, Cancel ──> ranks
    rank ── RankReady, Announced, Arrived, TransferLost, Sent, RankFailed ──> worker
    scheduler ── StepsDone ──> worker

KV never crosses this link: ranks send it to the ranks of other workers.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, cast

import msgspec
import zmq
import zmq.asyncio

from common.engine.transfer import KVConnection, Mailbox
from common.engine.vllm.core_log import started_by
from common.engine.vllm.layout import KVGroup, num_units
from common.errors import ConfigError, WireError
from common.latency import StepShape
from common.machine import PrivateFolder
from common.wire import MAX_MESSAGE_BYTES, MAX_MESSAGES_PER_TURN, Curve, DropLog, bind
from common.wire.messages import KVDone, KVTarget

log = logging.getLogger(__name__)
SCHEDULER = -1
"""Sender of the scheduler's messages; ranks are numbered from 0."""
BEAT_S = 1.0
"""Interval, in seconds, of messages that show the other end that this one is alive."""
MAX_QUEUED = 256
"""Messages waiting for a slow worker beyond which a scheduler's `StepsDone` is dropped."""
LINK_HWM = 10_000
"""Messages that ZeroMQ queues for one rank."""
TERM_S = 1.0
"""Time, in seconds, that an orphaned engine process gets to exit before it is killed."""
EXTRA_CONFIG = "diptych"
"""Key of `ConnectorSettings` in `kv_connector_extra_config`."""


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that a worker passes to the connectors of its engine.

    `weights` identifies the model and its weights: ranks exchange KV only if it and the layout are equal. Rank `r`
    listens for KV on `kv_port + r`, or on a free port if `kv_port` is 0. `kv_transport` is the worker's setting of that
    name. `receives`: whether prompts arrive from other workers. `staging_bytes` is the host memory of each rank for KV
    that arrives before its request is scheduled; 0 for what the longest prompt needs.
    `grant_timeout_s`, `transfer_timeout_s`: maximum time that announced KV waits for staging memory, and that a
    transfer makes no progress.
    """

    link_address: str
    link_key: str
    silence_s: float
    worker_id: str
    epoch: int
    weights: str
    kv_host: str = "127.0.0.1"
    kv_port: int = 0
    num_streams: int = 1
    kv_transport: str = "auto"
    lease_s: float = 10.0
    grant_timeout_s: float = 30.0
    transfer_timeout_s: float = 30.0
    receives: bool = True
    staging_bytes: int = 0
    curve_key: str = ""
    curve_authorized: str = ""

    def extra_config(self) -> dict[str, Any]:
        """Return `kv_connector_extra_config`."""
        return {EXTRA_CONFIG: msgspec.to_builtins(self)}

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> ConnectorSettings:
        """Read them in a connector. Raises ConfigError."""
        try:
            return msgspec.convert(extra_config.get(EXTRA_CONFIG), cls)
        except msgspec.ValidationError as error:
            raise ConfigError(
                "kv_connector_extra_config", str(error), "the settings of a Diptych worker, which starts vLLM itself"
            ) from error


class LinkMessage(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Base of the messages."""


class RequestMessage(LinkMessage, frozen=True):
    """Base of the messages about one attempt of a request, by the id that routers use."""

    request_id: str
    attempt: int

    @property
    def key(self) -> tuple[str, int]:
        return (self.request_id, self.attempt)


# ---------------------------------------------------------------- worker -> rank


class Expect(RequestMessage, frozen=True, tag=1):
    """KV of a prompt of `num_tokens` tokens will arrive. Its first `first_block` blocks are cached here."""

    num_tokens: int
    first_block: int = 0


class Forget(RequestMessage, frozen=True, tag=2):
    """Drop KV that was expected or has arrived. Harmless if vLLM has already loaded it.

    `reason` is reported to the prefill worker as a failure. If it is "", the KV is not needed, and the prefill worker's
    transfer is acknowledged.
    """

    reason: str = ""


class Done(RequestMessage, frozen=True, tag=3):
    """The prompt is computed and its first token sampled. The remaining KV is sent, followed by `done`."""

    done: KVDone


class Cancel(RequestMessage, frozen=True, tag=4):
    """End an outgoing transfer. `phase`: phase in which the request failed permanently, or ""."""

    reason: str
    phase: str = ""


class WorkerAlive(LinkMessage, frozen=True, tag=5):
    """The worker is alive; sent to every rank and the scheduler."""


class Admit(RequestMessage, frozen=True, tag=6):
    """Allocate slots for this prompt, after those of all prompts admitted earlier. Reply to `Announced`."""


# ---------------------------------------------------------------- rank -> worker


class RankReady(LinkMessage, frozen=True, tag=20):
    """The rank has allocated its KV cache and listens at `kv_address`. `rank` is the sender's.

    `layout` describes the KV of the whole model, independent of the number of ranks. Workers exchange KV only if it is
    equal. `groups` are the KV cache groups of this rank's layers. `num_slots` is the number of blocks that may arrive
    before their requests are scheduled.
    """

    rank: int
    world_size: int
    kv_address: str
    layout: str
    groups: tuple[KVGroup, ...]
    num_slots: int

    def fits(self, num_tokens: int, first_block: int) -> bool:
        """Whether staging memory can store the KV of a prompt without its first blocks."""
        return num_units(self.groups, num_tokens) - first_block <= self.num_slots


class Arrived(RequestMessage, frozen=True, tag=21):
    """This rank has verified all KV of a prompt. `done` is the prefill worker's; `transfer_s` began with the grant.

    `busy_s` is the time in which it received blocks, in seconds; 0 if unknown.
    """

    done: KVDone
    num_bytes: int = 0
    transfer_s: float = 0.0
    busy_s: float = 0.0
    transport: str = "tcp"


class TransferLost(RequestMessage, frozen=True, tag=22):
    """Expected KV will not arrive, and this rank has dropped what had arrived.

    `phase` is that of a permanent failure, or "".
    """

    reason: str
    phase: str = ""


class Sent(RequestMessage, frozen=True, tag=23):
    """End of this rank's outgoing transfer. `reason` is "" if it was acknowledged. Times are in seconds.

    `exposed_s` is the time from the end of prefill to the acknowledgement. `num_skipped` blocks were cached at the
    receiver.
    """

    reason: str
    num_bytes: int = 0
    num_skipped: int = 0
    grant_wait_s: float = 0.0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    transport: str = "tcp"


class RankAlive(LinkMessage, frozen=True, tag=24):
    """The rank, or the scheduler, is alive."""


class Announced(RequestMessage, frozen=True, tag=26):
    """A prefill worker has announced the KV of a prompt. Only the first of several ranks reports this."""


class RankFailed(LinkMessage, frozen=True, tag=27):
    """A thread of this rank has died, without which transfers would hang: the engine must end."""

    reason: str


class StepsDone(LinkMessage, frozen=True, tag=25):
    """Steps of the engine have ended; sent by the scheduler, and dropped if the worker is slow.

    `steps` are their work, and the time in seconds from scheduling a step to its results, or since the results of the
    step before if it was scheduled earlier. They took the blocks of `num_preempted` requests. The other fields are
    those after the last step. `num_waiting_tokens` are the tokens of prompts that are not computed yet, running or
    waiting.
    """

    steps: tuple[tuple[StepShape, float], ...]
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_context_tokens: int
    num_free_blocks: int
    num_total_blocks: int
    num_preempted: int = 0


Order = Expect | Admit | Forget | Done | Cancel
ToRank = Order | WorkerAlive
LinkEvent = Announced | Arrived | TransferLost | Sent | RankFailed | StepsDone
FromRank = RankReady | RankAlive | LinkEvent
OnMessage = Callable[[int, "RankReady | LinkEvent"], None]

_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[tuple[int, FromRank]] = msgspec.msgpack.Decoder(tuple[int, FromRank])
_packer = msgspec.msgpack.Encoder()
_MAC_BYTES = 16


def seal(key: bytes, content: object) -> bytes:
    """Encode the content and append its authentication code."""
    packed = _packer.encode(content)
    return packed + blake2b(packed, key=key, digest_size=_MAC_BYTES).digest()


def unseal(key: bytes, data: bytes) -> bytes:
    """Return the encoded content. Raises WireError unless it was sealed with this key."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(data)} bytes exceeds the maximum of {MAX_MESSAGE_BYTES}")
    packed, code = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
    if not hmac.compare_digest(code, blake2b(packed, key=key, digest_size=_MAC_BYTES).digest()):
        raise WireError("the message does not come from this worker's engine")
    return packed


def joined_addresses(addresses: Sequence[str]) -> str:
    """Join the KV addresses of all ranks, in order, for `WorkerHello.kv_address`: "tcp://h1:1,2,tcp://h2:1"."""
    host, parts = "", []
    for address in addresses:
        before, _, port = address.rpartition(":")
        parts.append(port if before == host else address)
        host = before
    return ",".join(parts)


def split_addresses(joined: str) -> tuple[str, ...]:
    """Inverse of `joined_addresses`."""
    host, addresses = "", []
    for part in joined.split(","):
        address = part if "://" in part else f"{host}:{part}"
        addresses.append(address)
        host = address.rpartition(":")[0]
    return tuple(addresses)


# ---------------------------------------------------------------- kv_transfer_params of a request


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """The KV of this prompt goes to the decode worker `target`, whose address is the joined one of its ranks."""

    request_id: str
    attempt: int
    target: KVTarget


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The KV of the prompt's first `num_tokens` tokens has arrived, except the first `first_block` blocks."""

    request_id: str
    attempt: int
    num_tokens: int
    first_block: int = 0


class TransferParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Content of `SamplingParams.extra_args["kv_transfer_params"]`.

    The last `earlier` tokens of the prompt are output of the request: the first token of a prefill worker, or the
    tokens before a takeover.
    """

    send: Send | None = None
    load: Load | None = None
    earlier: int = 0

    def to_dict(self) -> dict[str, Any]:
        params: dict[str, Any] = msgspec.to_builtins(self)
        return params

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> TransferParams:
        """Read them in a connector. Raises msgspec.ValidationError."""
        return msgspec.convert(params or {}, cls)


# ---------------------------------------------------------------- the worker's end


class RankLink:
    """The worker's end of the link. All methods run on one event loop."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        on_message: OnMessage,
        *,
        host: str = "",
        curve: Curve | None = None,
        key: bytes = b"",
    ) -> None:
        """Bind an ipc socket in a private directory, or with `host` a TCP socket for ranks on other machines.

        `key` authenticates messages, 32 bytes; b"" for a random one.
        `on_message(rank, message)` gets every message except those that only show that a rank is alive; `rank` is
        `SCHEDULER` for `StepsDone`. Raises zmq.ZMQError if the address is not one of this machine.
        """
        self.key = key or secrets.token_bytes(32)
        self._on_message = on_message
        self._peers: dict[int, bytes] = {}
        self._heard: dict[int, float] = {}
        self._drops = DropLog(log, "a message on the engine link")
        self._folder: PrivateFolder | None = None
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, LINK_HWM)
        self._socket.set(zmq.RCVHWM, LINK_HWM)
        self._socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        try:
            if host:
                self.address = bind(self._socket, host, 0, curve)
            else:
                self._folder = PrivateFolder("link")
                self.address = f"ipc://{self._folder.path / 'link'}"
                self._socket.bind(self.address)
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def num_dropped(self) -> int:
        """Invalid messages dropped."""
        return self._drops.num_dropped

    def connected(self) -> frozenset[int]:
        """Return the ranks, and `SCHEDULER`, that have sent anything."""
        return frozenset(self._peers)

    def silence_s(self, now: float) -> float:
        """Return the time, in seconds, since the most silent rank or the scheduler was last heard; 0 for none."""
        return max((now - at for at in self._heard.values()), default=0.0)

    def send(self, rank: int | None, message: ToRank) -> bool:
        """Send to a rank, or to all ranks with None, without waiting.

        Returns False if a rank is gone or does not read, in which case the engine has failed.
        """
        ranks = [each for each in self._peers if each != SCHEDULER] if rank is None else [rank]
        sealed = seal(self.key, message)
        sent = [self._send(each, sealed) for each in ranks]
        return all(sent)

    async def run(self) -> None:
        """Receive messages, and show the ranks that this worker is alive, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self._beat())

    def close(self) -> None:
        """Close the socket and remove its directory. Ranks that remain end after their silence limit."""
        self._socket.close()
        if self._folder is not None:
            self._folder.close()

    def _send(self, rank: int, sealed: bytes) -> bool:
        if (peer := self._peers.get(rank)) is None:
            return False
        sent = cast("asyncio.Future[object]", self._socket.send_multipart([peer, sealed], zmq.NOBLOCK))
        return not (sent.done() and sent.exception() is not None)  # with NOBLOCK it completes at once

    async def _receive(self) -> None:
        num_in_a_row = 0
        while True:
            parts = await self._socket.recv_multipart()
            now = time.monotonic()
            try:
                if len(parts) != 2:
                    raise WireError(f"{len(parts)} parts instead of 2")
                rank, message = _from_rank.decode(unseal(self.key, parts[1]))
            except (WireError, msgspec.MsgspecError) as error:
                self._drops.add(str(error), now)
            else:
                self._peers[rank], self._heard[rank] = parts[0], now
                if not isinstance(message, RankAlive):
                    self._on_message(rank, message)
            num_in_a_row += 1
            if num_in_a_row >= MAX_MESSAGES_PER_TURN:
                num_in_a_row = 0
                await asyncio.sleep(0)

    async def _beat(self) -> None:
        alive = seal(self.key, WorkerAlive())
        while True:
            for rank in self._peers:
                self._send(rank, alive)
            self._drops.flush(time.monotonic())
            await asyncio.sleep(BEAT_S)


# ---------------------------------------------------------------- the engine's end


def exit_orphaned(why: str) -> None:
    """End this engine process, whose worker is gone: with SIGTERM, and forcibly if it does not exit in time."""
    log.critical("vllm engine: %s: exiting", why)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(TERM_S)
    os._exit(1)


class WorkerLink:
    """A rank's, or the scheduler's, end of the link, with a thread. `send` may be called on any thread.

    The process ends if its parent process does, or if the worker is silent for `silence_s`. The latter counts only time
    in which this process ran, so that a suspended machine continues. PR_SET_PDEATHSIG is not used: it fires when the
    parent's thread ends, and vLLM starts its processes on short-lived threads.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: ConnectorSettings,
        rank: int,
        on_message: Callable[[Order], None] = lambda message: None,
        on_orphaned: Callable[[str], None] = exit_orphaned,
    ) -> None:
        """`on_message` and `on_orphaned` are called on the link's thread."""
        self._settings, self._rank, self._key = settings, rank, bytes.fromhex(settings.link_key)
        self._on_message, self._on_orphaned = on_message, on_orphaned
        self._context = context
        is_remote = settings.link_address.startswith("tcp://")  # an ipc socket is in a private directory
        self._curve = Curve.load(settings.curve_key, settings.curve_authorized) if is_remote else None
        self._parent = started_by()
        self._lock = threading.Lock()  # a mailbox has one sending thread
        self._outbox: Mailbox[bytes | None] = Mailbox(context)
        self._queued: deque[bytes] = deque()
        self._silence_s = 0.0
        self._is_closed = False
        self._drops = DropLog(log, "a message on the engine link")
        self.num_dropped_steps = 0
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name=f"worker-link-{rank}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: FromRank) -> None:
        """Queue a message to the worker. `StepsDone` is dropped if the worker does not keep up."""
        if isinstance(message, StepsDone) and len(self._queued) > MAX_QUEUED:
            self.num_dropped_steps += 1
            return
        sealed = seal(self._key, (self._rank, message))
        with self._lock:
            if not self._is_closed:
                self._outbox.put(sealed)

    def stop(self, timeout_s: float = 2.0) -> None:
        """Stop the thread and close its socket. Later messages are dropped."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._outbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        self._outbox.close_sending()

    def _main(self) -> None:
        poller = zmq.Poller()
        connection = None
        try:
            connection = KVConnection(
                self._context, poller, self._settings.link_address, 1, self._curve, MAX_MESSAGE_BYTES
            )
            poller.register(self._outbox.socket, zmq.POLLIN)
            while self._turn(poller, connection):
                pass
        except BaseException as error:
            log.exception("the link to the worker died")
            self.failure = error
            self._on_orphaned("the link to the worker failed")
        finally:
            if connection is not None:
                connection.close()
            self._outbox.close()

    def _turn(self, poller: zmq.Poller, connection: KVConnection) -> bool:
        socket = connection.streams[0]
        began = time.monotonic()
        poller.modify(socket, zmq.POLLIN | (zmq.POLLOUT if self._queued else 0))
        ready = dict(poller.poll(int(BEAT_S * 1000)))
        now = time.monotonic()
        for sealed in self._outbox.take():
            if sealed is None:
                self._flush(socket)
                return False
            self._queued.append(sealed)
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            if not self._queued:
                self._queued.append(seal(self._key, (self._rank, RankAlive())))
        self._flush(socket)
        connection.dial_again(now)
        self._silence_s += min(now - began, 2 * BEAT_S)
        if ready.get(socket, 0) & zmq.POLLIN:
            self._receive(socket, now)
        self._drops.flush(now)
        if os.getppid() != self._parent:
            self._on_orphaned("its parent process has ended")
            return False
        if self._silence_s > self._settings.silence_s:
            self._on_orphaned(f"the worker was silent for {self._settings.silence_s:g} s")
            return False
        return True

    _beat_at = 0.0

    def _flush(self, socket: zmq.Socket[bytes]) -> None:
        while self._queued:
            try:
                socket.send(self._queued[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._queued.popleft()

    def _receive(self, socket: zmq.Socket[bytes], now: float) -> None:
        for _ in range(MAX_MESSAGES_PER_TURN):
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(parts) != 1:
                    raise WireError(f"{len(parts)} parts instead of 1")
                message = _to_rank.decode(unseal(self._key, parts[0]))
            except (WireError, msgspec.MsgspecError) as error:
                self._drops.add(str(error), now)
                continue
            self._silence_s = 0.0
            if not isinstance(message, WorkerAlive):
                self._on_message(message)
