"""KV transfers of one vLLM rank, in both directions.

    prefill: opened ──step──> blocks final ──sent──> acknowledged or failed ──held by vLLM──> released
    decode:  expected ──KVOpen──> admitted ──slots free──> granted ──complete──> arrived ──load──> in vLLM's blocks
                 └── forgotten, refused, stalled: slots freed, the sender is notified ┘

A prompt has one transfer per pair of ranks that share heads. The worker process orders and is notified over the link.
vLLM's model thread passes block tables, and copies of this rank's own threads read and write blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import zmq
from msgspec.structs import replace

from common.engine.transfer import (
    Frames,
    IncomingTransfer,
    IncomingTransfers,
    KVListener,
    KVReceiver,
    KVSender,
    SenderMemory,
    TransferCompleted,
    TransferEnded,
    TransferFailed,
    TransferOpened,
    new_transport,
)
from common.engine.vllm.layout import TransferName, Unit, base_of, can_skip_blocks, num_ready, transfer_name, units_of
from common.engine.vllm.link import (
    Admit,
    Announced,
    Arrived,
    Cancel,
    ConnectorSettings,
    Done,
    Expect,
    Forget,
    FromRank,
    Order,
    RankFailed,
    RankReady,
    Send,
    Sent,
    TransferLost,
    split_addresses,
)
from common.engine.vllm.staging import RankBlocks, RankCache, StagingSlots
from common.errors import ConfigError, WireError
from common.wire import Curve
from common.wire.messages import KVDone, KVTarget

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
TICK_S = 0.25
"""Interval, in seconds, at which timeouts are checked."""
MAX_FORGOTTEN = 4096
"""Forgotten requests whose later announcements are answered at once."""
NULL_BLOCK = 0
"""Block that vLLM puts into tables in place of blocks outside of a window."""

Key = tuple[str, int]
Tables = tuple[Sequence[int], ...]
"""A request's block table in each KV cache group."""


# ---------------------------------------------------------------- orders of vLLM's scheduler, for one step


@dataclass(frozen=True, slots=True)
class Open:
    """A prompt of `num_tokens` tokens is scheduled for the first time. `vllm_id` is vLLM's id of the request."""

    vllm_id: str
    send: Send
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Computed:
    """After the step, the first `num_computed` tokens of the prompt are computed, in the blocks of `tables`."""

    key: Key
    tables: Tables
    num_computed: int


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Copy KV that has arrived into the blocks of `tables`, except the blocks before token `num_cached`."""

    vllm_id: str
    key: Key
    num_tokens: int
    num_cached: int
    tables: Tables


@dataclass(slots=True)
class StepOrders:
    """Orders of one step. `preempted` prompts lose their blocks before it, `cancelled` ones for good.

    Requests in `finished` ended; vLLM keeps their blocks until the rank reports them. KV of `unneeded` requests is
    dropped.
    """

    opens: list[Open] = field(default_factory=list)
    computed: list[Computed] = field(default_factory=list)
    preempted: list[Key] = field(default_factory=list)
    cancelled: list[Key] = field(default_factory=list)
    finished: list[tuple[str, Key]] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    unneeded: list[Key] = field(default_factory=list)


# ---------------------------------------------------------------- state


@dataclass(slots=True, eq=False)
class _Outgoing:
    """A prompt that this rank sends. `numbers` and `open`: per transfer name. `revision` counts preemptions."""

    key: Key
    num_tokens: int
    units: tuple[Unit, ...]
    decode: dict[str, int]
    num_decode: int
    num_ready: int = 0
    revision: int = 0
    numbers: dict[str, list[int]] = field(default_factory=dict)
    done: KVDone | None = None
    open: set[str] = field(default_factory=set)
    ended: list[TransferEnded] = field(default_factory=list)
    reason: str = ""
    is_reported: bool = False


@dataclass(slots=True, eq=False)
class _Pair:
    """A transfer from one prefill rank; the `Recipient` of `IncomingTransfers`."""

    request_id: str
    attempt: int
    peer: bytes
    opened_at: float
    blocks: list[int] = field(default_factory=list)
    memory: SenderMemory | None = None
    quantised: bool = False
    lent: bool = False
    renewed_at: float = 0.0
    granted_at: float = 0.0
    completed: IncomingTransfer | None = None
    is_growing = False


@dataclass(slots=True, eq=False)
class _Incoming:
    """A prompt that this rank receives. `names` are the expected transfers, known with the first announcement."""

    key: Key
    units: tuple[Unit, ...]
    first: int
    slots: list[int] = field(default_factory=list)
    has_slots: bool = False
    names: frozenset[str] = frozenset()
    pairs: dict[str, _Pair] = field(default_factory=dict)
    has_arrived: bool = False
    is_loading: bool = False

    @property
    def num_needed(self) -> int:
        return len(self.units) - self.first


class RankTransfers:
    """Transfers of one rank. The methods may be called on any thread, those of a step on vLLM's model thread only."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: ConnectorSettings,
        cache: RankCache,
        report: Callable[[FromRank], None],
        *,
        world_size: int = 1,
        curve: Curve | None = None,
    ) -> None:
        """`report` sends to the worker and must not block. Raises ConfigError or zmq.ZMQError."""
        transport = new_transport(settings.kv_transport, settings.worker_id)
        self._settings, self._cache, self._report, self._world_size = settings, cache, report, world_size
        self.layout = layout = cache.layout
        self.rank = layout.stage * layout.size + layout.rank
        self._fingerprint = layout.fingerprint(settings.weights)
        self._lock = threading.RLock()
        self._outgoing: dict[Key, _Outgoing] = {}
        self._senders: dict[Key, _Outgoing] = {}  # by transfer name and attempt
        self._incoming: dict[tuple[str, int], _Incoming] = {}  # by base and attempt
        self._waiting: dict[tuple[str, int], _Incoming] = {}  # for slots, in the order of admission
        self._forgotten: OrderedDict[tuple[str, int], str] = OrderedDict()
        self._finished: dict[str, Key] = {}
        self._received: dict[str, bool] = {}  # by vLLM's id: whether the load has succeeded
        self._copies: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._steps: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # of a GPU
        self._stopping = threading.Event()
        self.failure: BaseException | None = None
        self.slots = StagingSlots(cache, settings.staging_bytes)
        self._blocks = blocks = RankBlocks(cache)
        frames = Frames(blocks.view, blocks.views)
        outgoing, incoming = transport.outgoing(blocks, blocks, frames), transport.incoming(blocks, self.slots)
        listener = _listener(context, settings, self.rank, curve)
        transports = () if incoming is None else (incoming,)
        self._receiver = KVReceiver(context, listener, self.slots, self._on_event, transports=transports)
        self._transfers = IncomingTransfers(
            self._receiver,
            epoch=settings.epoch,
            fingerprint=self._fingerprint,
            required=transport.name if transport.is_required else "",
        )
        self._sender = KVSender(
            context,
            frames,
            outgoing,
            blocks.block_bytes,
            (settings.worker_id, settings.epoch, self._fingerprint),
            self._on_ended,
            lease_s=settings.lease_s,
            num_streams=settings.num_streams,
            curve=curve,
        )
        self._threads = [
            threading.Thread(target=self._guard, args=work, name=name, daemon=True)
            for name, *work in (
                ("kv-loads", self._work, self._copies),
                ("kv-steps", self._work, self._steps),
                ("kv-timeouts", self._expire_all),
            )
        ]

    def start(self) -> None:
        """Start all threads and report that this rank is ready."""
        self._receiver.start()
        self._sender.start()
        for thread in self._threads:
            thread.start()
        self._report(
            RankReady(
                rank=self.rank,
                world_size=self._world_size,
                kv_address=self._receiver.address,
                layout=self.layout.describe(),
                groups=self.layout.groups,
                num_slots=self.slots.num_slots,
            )
        )

    def stop(self) -> None:
        """End all transfers and threads."""
        self._stopping.set()
        for queue in (self._copies, self._steps):
            queue.put(None)
        for thread in self._threads:
            thread.join(2.0)
        self._sender.stop()
        self._receiver.stop()

    def check(self) -> None:
        """Raise RuntimeError if a thread has died, without which transfers would hang."""
        for name, failure in (
            ("copies", self.failure),
            ("KV sender", self._sender.failure),
            ("KV receiver", self._receiver.failure),
        ):
            if failure is not None:
                why = f"{type(failure).__name__}: {failure}"
                raise RuntimeError(f"the thread of the {name} has died: {why}") from failure

    # ------------------------------------------------------------ orders of the worker

    def order(self, message: Order) -> None:
        """Obey an order of the worker."""
        with self._lock:
            match message:
                case Expect():
                    self._expect(message)
                case Admit():
                    self._admit((base_of(message.request_id), message.attempt))
                case Forget():
                    self._forget(message.key, message.reason)
                case Done():
                    self._finish(message)
                case Cancel():
                    self._cancel(message.key, message.reason, message.phase)

    # ------------------------------------------------------------ calls of a step

    def before_step(self, orders: StepOrders) -> None:
        """Obey the orders that precede the step, before it overwrites any block."""
        self.check()
        with self._lock:
            for key in orders.preempted:
                self._withdraw(key)
            for key in orders.cancelled:
                self._cancel(key, "the request was aborted")
            for opened in orders.opens:
                self._open(opened)
            for vllm_id, key in orders.finished:
                self._finished[vllm_id] = key
            for key in orders.unneeded:
                self._forget(key, "")
            for load in orders.loads:
                self._load(load)

    def after_step(self, orders: StepOrders) -> None:
        """Send what the step has computed, once it has been computed."""
        if not orders.computed:
            return
        with self._lock:
            revisions = {key: state.revision for key, state in self._outgoing.items()}
        ended = self._cache.fence()
        if ended is None:
            self._send(orders.computed, revisions)
        else:
            self._steps.put(lambda: self._send_after(ended, orders.computed, revisions))

    def take_finished(self) -> tuple[set[str], set[str], set[str]]:
        """Return vLLM's ids of requests whose blocks are no longer read, whose load has ended, and has failed."""
        with self._lock:
            sent = {vllm_id for vllm_id, key in self._finished.items() if not self._is_sending(key)}
            for vllm_id in sent:
                self._outgoing.pop(self._finished.pop(vllm_id), None)
            received, self._received = self._received, {}
        return sent, set(received), {vllm_id for vllm_id, succeeded in received.items() if not succeeded}

    def check_integrity(self) -> list[str]:
        """Return what is inconsistent in this state."""
        with self._lock:
            used = [slot for incoming in self._incoming.values() for slot in incoming.slots]
            problems = self.slots.problems(used)
            if any(each.has_slots or self._incoming.get(base) is not each for base, each in self._waiting.items()):
                problems.append("a request without need waits for slots")
            sending = {(name, each.key[1]) for each in self._outgoing.values() for name in each.open}
            if sending != set(self._senders):
                problems.append(f"transfers {sending ^ set(self._senders)} have no prompt")
            return problems

    @property
    def is_idle(self) -> bool:
        """Whether no request has any state here."""
        with self._lock:
            return not (self._outgoing or self._senders or self._incoming or self._finished or self._received)

    # ------------------------------------------------------------ sending

    def _open(self, order: Open) -> None:
        send, layout = order.send, self.layout
        key = (send.request_id, send.attempt)
        addresses = split_addresses(send.target.address)
        size, odd = divmod(len(addresses), layout.num_stages)
        units = units_of(layout.groups, order.num_tokens)
        state = self._outgoing[key] = _Outgoing(key, order.num_tokens, units, {}, size)
        if odd:
            state.reason = f"{len(addresses)} decode ranks cannot have {layout.num_stages} pipeline stages"
        else:
            try:
                receivers = layout.sends_to(size)
            except WireError as error:
                state.reason, receivers = str(error), ()
            state.decode = {
                transfer_name(send.request_id, layout.rank, layout.size, decode): decode for decode in receivers
            }
        state.open = set(state.decode)
        for name, decode in state.decode.items():
            state.numbers[name] = [-1] * len(units)
            address = addresses[layout.stage * size + decode]
            self._senders[name, send.attempt] = state
            target = KVTarget(send.target.worker_id, send.target.epoch, address)
            self._sender.open(name, send.attempt, target, state.numbers[name], 0)
        self._report_sent(state)

    def _send_after(self, ended: torch.cuda.Event, computed: Iterable[Computed], revisions: Mapping[Key, int]) -> None:
        ended.synchronize()
        self._send(computed, revisions)

    def _send(self, computed: Iterable[Computed], revisions: Mapping[Key, int]) -> None:
        with self._lock:
            for each in computed:
                state = self._outgoing.get(each.key)
                if state is None or not state.open or revisions.get(each.key) != state.revision:
                    continue  # it has ended, or lost these blocks since the step
                groups, before = self.layout.groups, state.num_ready
                state.num_ready = num_ready(groups, state.units, state.num_tokens, each.num_computed, before)
                for name, decode in state.decode.items():
                    ranges = [self.layout.outgoing(group, decode, state.num_decode) for group in range(len(groups))]
                    for place in range(before, state.num_ready):
                        group, index = state.units[place]
                        block = each.tables[group][index]
                        state.numbers[name][place] = self._blocks.numbers.number(block, ranges[group])
                if any(
                    each.tables[group][index] == NULL_BLOCK for group, index in state.units[before : state.num_ready]
                ):
                    self._cancel(state.key, "vLLM released a block before it was sent")
                else:
                    self._progress(state)

    def _progress(self, state: _Outgoing) -> None:
        done = state.done if state.num_ready == len(state.units) else None
        for name in state.open:
            named = None if done is None else replace(done, request_id=name)
            self._sender.progress(name, state.key[1], state.num_ready, named, state.numbers[name])

    def _finish(self, message: Done) -> None:
        state = self._outgoing.get(message.key)
        if state is None:
            self._report(
                Sent(request_id=message.request_id, attempt=message.attempt, reason="the prompt has no KV transfer")
            )
            return
        state.done = message.done
        if state.num_ready == len(state.units):
            self._progress(state)

    def _withdraw(self, key: Key) -> None:
        """Stop reading the blocks of a preempted prompt. They are sent from others after it was computed again."""
        state = self._outgoing.get(key)
        if state is None:
            return
        for name in state.open:
            self._sender.withdraw(name, key[1])
            state.numbers[name] = [-1] * len(state.units)
        state.num_ready, state.revision = 0, state.revision + 1

    def _cancel(self, key: Key, reason: str, phase: str = "") -> None:
        state = self._outgoing.get(key)
        if state is None:
            return
        for name in list(state.open):
            self._sender.cancel(name, key[1], reason, phase)
            self._drop(state, name)
        state.reason = state.reason or reason
        self._report_sent(state)

    def _on_ended(self, ended: TransferEnded) -> None:
        """Handle the end of a transfer, on the sender's thread."""
        with self._lock:
            state = self._senders.get((ended.request_id, ended.attempt))
            if state is None:
                return
            self._sender.cancel(ended.request_id, ended.attempt, "")
            self._drop(state, ended.request_id)
            state.ended.append(ended)
            if ended.reason:
                self._cancel(state.key, ended.reason)
            else:
                self._report_sent(state)

    def _drop(self, state: _Outgoing, name: str) -> None:
        state.open.discard(name)
        self._senders.pop((name, state.key[1]), None)

    def _report_sent(self, state: _Outgoing) -> None:
        if state.open or state.is_reported:
            return
        state.is_reported = True
        ended = state.ended
        self._report(
            Sent(
                request_id=state.key[0],
                attempt=state.key[1],
                reason=state.reason,
                num_bytes=sum(each.num_bytes for each in ended),
                num_skipped=max((each.num_skipped for each in ended), default=0),
                grant_wait_s=max((each.grant_wait_s for each in ended), default=0.0),
                transfer_s=max((each.transfer_s for each in ended), default=0.0),
                exposed_s=max((each.exposed_s for each in ended), default=0.0),
                transport=ended[-1].transport if ended else "tcp",
            )
        )

    def _is_sending(self, key: Key) -> bool:
        state = self._outgoing.get(key)
        return state is not None and bool(state.open)

    # ------------------------------------------------------------ receiving

    def _expect(self, message: Expect) -> None:
        base, attempt = base_of(message.request_id), message.attempt
        units = units_of(self.layout.groups, message.num_tokens)
        first = message.first_block if can_skip_blocks(self.layout.groups) else 0
        incoming = _Incoming(message.key, units, min(first, len(units)))
        for other in [each for each in self._incoming if each[0] == base and each[1] <= attempt]:
            self._lose(self._incoming[other], "superseded by a new attempt", reports=False)
        self._incoming[base, attempt] = incoming
        if incoming.num_needed > self.slots.num_slots:
            why = f"{incoming.num_needed} blocks exceed the {self.slots.num_slots} of the staging memory"
            self._lose(incoming, why)
            return
        for early in self._transfers.take_early_if(lambda each: _is_of(each.request_id, base)):
            self._on_opened(early)

    def _forget(self, key: Key, reason: str) -> None:
        base = (base_of(key[0]), key[1])
        incoming = self._incoming.get(base)
        if incoming is not None:
            self._lose(incoming, reason, reports=False)
            return
        self._remember(base, reason)
        for early in self._transfers.take_early_if(lambda each: _is_of(each.request_id, base[0])):
            self._on_opened(early)

    def _remember(self, base: tuple[str, int], reason: str) -> None:
        self._forgotten[base] = reason
        if len(self._forgotten) > MAX_FORGOTTEN:
            self._forgotten.popitem(last=False)

    def _on_event(self, event: TransferOpened | TransferCompleted | TransferFailed) -> None:
        """Handle an event of the receiver, on its thread."""
        with self._lock:
            match event:
                case TransferOpened():
                    self._on_opened(event)
                case TransferCompleted(transfer=transfer):
                    self._on_completed(transfer)
                case TransferFailed():
                    self._on_failed(event)

    def _on_opened(self, event: TransferOpened) -> None:
        message, now = event.message, time.monotonic()
        problem = self._transfers.mismatch(event)
        try:
            name = TransferName.parse(message.request_id)
            if name.decode != self.layout.rank:
                problem = problem or f"sent to rank {name.decode}, but this is rank {self.layout.rank}"
        except WireError as error:
            problem, name = str(error), None
        if problem or name is None:
            self._transfers.refuse(event.peer, message, problem)
            return
        incoming = self._incoming.get((name.base, message.attempt))
        if incoming is None:
            self._on_unexpected(event, name, now)
        elif incoming.has_arrived:
            self._transfers.not_needed(event.peer, message)
        elif problem := self._problem(incoming, event, name):
            self._transfers.refuse(event.peer, message, problem)
            self._lose(incoming, problem)
        elif (pair := incoming.pairs.get(message.request_id)) is not None:
            self._on_repeated(incoming, pair, event, now)
        else:
            pair = _Pair(message.request_id, message.attempt, event.peer, now, memory=event.memory, renewed_at=now)
            incoming.pairs[message.request_id] = pair
            if len(incoming.pairs) == 1:
                self._on_announced(incoming)
            self._grant_all(now)

    def _on_announced(self, incoming: _Incoming) -> None:
        if self._world_size == 1:
            self._waiting[base_of(incoming.key[0]), incoming.key[1]] = incoming
        elif self.rank == 0:  # a prompt is announced to each rank
            self._report(Announced(request_id=incoming.key[0], attempt=incoming.key[1]))

    def _admit(self, base: tuple[str, int]) -> None:
        incoming = self._incoming.get(base)
        if incoming is not None and not incoming.has_slots:
            self._waiting[base] = incoming
            self._grant_all(time.monotonic())

    def _on_unexpected(self, event: TransferOpened, name: TransferName, now: float) -> None:
        reason = self._forgotten.get((name.base, event.message.attempt))
        if reason is None:
            self._transfers.keep_early(event, now)
        elif reason:
            self._transfers.refuse(event.peer, event.message, reason)
        else:
            self._transfers.not_needed(event.peer, event.message)

    def _problem(self, incoming: _Incoming, event: TransferOpened, name: TransferName) -> str:
        """Return why this announcement does not match the request, or ""."""
        message = event.message
        if message.num_blocks != len(incoming.units):
            return f"{message.num_blocks} blocks do not match the length of the prompt, {len(incoming.units)} blocks"
        if not incoming.names:
            layout, request_id = self.layout, incoming.key[0]
            try:
                senders = layout.receives_from(name.size)
            except WireError as error:
                return str(error)
            incoming.names = frozenset(
                transfer_name(request_id, prefill, name.size, layout.rank) for prefill in senders
            )
        if message.request_id not in incoming.names:
            return f"no transfer from rank {name.prefill} of {name.size} is expected"
        return ""

    def _on_repeated(self, incoming: _Incoming, pair: _Pair, event: TransferOpened, now: float) -> None:
        if pair.completed is not None:
            self._transfers.not_needed(event.peer, event.message)
        elif pair.peer == event.peer:
            self._transfers.touch(pair, now)
        elif pair.lent:
            self._transfers.refuse(event.peer, event.message, "reconnected, frames may be lost")
            self._lose(incoming, "the prefill worker reconnected, frames may be lost")
        else:
            pair.peer, pair.memory = event.peer, event.memory

    def _grant_all(self, now: float) -> None:
        """Allocate slots to admitted requests in their order, and grant their announced transfers.

        No request overtakes, because small ones could keep a large one waiting forever. Several ranks must not wait for
        each other in a circle, each with slots for another request. They cannot: they get every `Admit` from the worker
        in one order, which is that of the announcements at rank 0. On each rank, the requests before the first one of
        this order that has not ended have freed their slots, and those after it only get slots that it leaves. So it
        has its slots on all ranks, and ends: it was announced, so its KV arrives and is loaded, or a timeout ends it.
        """
        free = self.slots.num_free
        for base, incoming in list(self._waiting.items()):
            if incoming.num_needed <= free:
                del self._waiting[base]
                incoming.slots, incoming.has_slots = self.slots.take(incoming.num_needed), True
            free = max(0, free - incoming.num_needed)
        for incoming in self._incoming.values():
            if not incoming.has_slots or incoming.has_arrived or incoming.is_loading:
                continue
            for pair in incoming.pairs.values():
                if not pair.lent and pair.completed is None:
                    self._grant(incoming, pair, now)

    def _grant(self, incoming: _Incoming, pair: _Pair, now: float) -> None:
        name = TransferName.parse(pair.request_id)
        groups = range(len(self.layout.groups))
        ranges = [self.layout.incoming(group, name.prefill, name.size) for group in groups]
        numbers = self.slots.numbers
        pair.blocks = [-1] * incoming.first + [
            numbers.number(slot, ranges[group])
            for slot, (group, _) in zip(incoming.slots, incoming.units[incoming.first :], strict=True)
        ]
        self._transfers.grant(pair, incoming.first, now)

    def _on_completed(self, transfer: IncomingTransfer) -> None:
        found = self._find(transfer.request_id, transfer.attempt)
        if found is None or transfer.done is None:
            return
        incoming, pair = found
        pair.completed, pair.lent = transfer, False
        completed = [each.completed for each in incoming.pairs.values() if each.completed is not None]
        if len(completed) < len(incoming.names):
            return
        incoming.has_arrived = True
        request_id, attempt = incoming.key
        self._report(
            Arrived(
                request_id=request_id,
                attempt=attempt,
                done=replace(transfer.done, request_id=request_id, token=0),
                num_bytes=sum(each.num_bytes for each in completed),
                transfer_s=max(max(each.last_block_at, each.done_at) - each.granted_at for each in completed),
                busy_s=0.0 if any(each.reads_ahead for each in completed) else sum(each.busy_s for each in completed),
                transport=transfer.transport,
            )
        )

    def _on_failed(self, event: TransferFailed) -> None:
        self._transfers.forget_early(event.request_id, event.attempt, event.peer)
        found = self._find(event.request_id, event.attempt)
        if found is None:
            return
        incoming, pair = found
        if incoming.has_arrived or (event.by_peer and event.peer != pair.peer):
            return
        pair.peer = b""  # the sender knows
        self._lose(incoming, event.reason, phase=event.phase)

    def _find(self, name: str, attempt: int) -> tuple[_Incoming, _Pair] | None:
        try:
            incoming = self._incoming.get((TransferName.parse(name).base, attempt))
        except WireError:
            return None
        pair = incoming.pairs.get(name) if incoming is not None else None
        return None if incoming is None or pair is None else (incoming, pair)

    def _lose(self, incoming: _Incoming, reason: str, *, phase: str = "", reports: bool = True) -> None:
        """Drop a request and its slots. `reason` is sent to the prefill ranks; "" acknowledges their transfers."""
        if incoming.is_loading:
            return  # its slots are freed after the copies
        base = (base_of(incoming.key[0]), incoming.key[1])
        del self._incoming[base]
        self._waiting.pop(base, None)
        self._remember(base, reason)
        for pair in incoming.pairs.values():
            if pair.completed is None:
                if not reason and pair.peer:
                    self._transfers.acknowledge(pair)
                self._transfers.release(pair, reason)
        self.slots.give(incoming.slots)
        if reports:
            request_id, attempt = incoming.key
            self._report(TransferLost(request_id=request_id, attempt=attempt, reason=reason, phase=phase))
        self._grant_all(time.monotonic())

    # ------------------------------------------------------------ loading

    def _load(self, order: LoadOrder) -> None:
        incoming = self._incoming.get((base_of(order.key[0]), order.key[1]))
        if (
            incoming is None
            or not incoming.has_arrived
            or len(incoming.units) != len(units_of(self.layout.groups, order.num_tokens))
        ):
            log.warning("request %s: its KV is not here, so vLLM computes the prompt", order.key[0])
            self._received[order.vllm_id] = False
            self._forget(order.key, "not loaded")
            return
        incoming.is_loading = True
        self._copies.put(lambda: self._copy_in(incoming, order))

    def _copy_in(self, incoming: _Incoming, order: LoadOrder) -> None:
        """Copy units into vLLM's blocks, on the copying thread."""
        copies: dict[int, list[tuple[int, Any]]] = {}
        for slot, (group, index) in zip(incoming.slots, incoming.units[incoming.first :], strict=True):
            block = order.tables[group][index]
            is_cached = index >= 0 and (index + 1) * self.layout.groups[group].block_size <= order.num_cached
            if block != NULL_BLOCK and not is_cached:
                unit = self.slots.unit(slot, self.layout.unit_bytes(group))
                copies.setdefault(group, []).append((block, unit))
        for group, units in copies.items():
            self._cache.write(group, units)
        with self._lock:
            del self._incoming[base_of(incoming.key[0]), incoming.key[1]]
            self.slots.give(incoming.slots)
            self._received[order.vllm_id] = True
            self._grant_all(time.monotonic())

    # ------------------------------------------------------------ threads

    def _guard(self, work: Callable[..., None], *args: object) -> None:
        try:
            work(*args)
        except BaseException as error:
            log.exception("a KV thread died")
            self.failure = error
            self._report(RankFailed(reason=f"{type(error).__name__}: {error}"))

    def _work(self, queue: SimpleQueue[Callable[[], None] | None]) -> None:
        while (work := queue.get()) is not None:
            work()

    def _expire_all(self) -> None:
        while not self._stopping.wait(TICK_S):
            self.check()  # also here, because an idle engine runs no step
            self.expire(time.monotonic())

    def expire(self, now: float) -> None:
        """End what has waited for too long, and renew the leases of senders that wait for slots.

        Raises RuntimeError if slots are lost, after which the engine restarts.
        """
        settings = self._settings
        with self._lock:
            self._transfers.expire_early(now)
            for transfer in self._transfers.stalled(now - settings.transfer_timeout_s):
                found = self._find(transfer.request_id, transfer.attempt)
                if found is not None:
                    missing = f"{transfer.num_missing} of {transfer.num_blocks - transfer.first_block} blocks missing"
                    self._lose(found[0], f"no KV received for {settings.transfer_timeout_s:g} s, {missing}")
            for incoming in list(self._incoming.values()):
                waiting = [each for each in incoming.pairs.values() if not each.lent and each.completed is None]
                if waiting and min(each.opened_at for each in waiting) < now - settings.grant_timeout_s:
                    why = f"no staging memory for {incoming.num_needed} blocks within {settings.grant_timeout_s:g} s"
                    self._lose(incoming, why)
                else:
                    for pair in waiting:
                        self._transfers.renew(pair, now)
            if not self._incoming and (num_lost := self.slots.num_slots - self.slots.num_free):
                raise RuntimeError(f"{num_lost} staging slots belong to no request")


def _listener(
    context: zmq.Context[zmq.Socket[bytes]], settings: ConnectorSettings, rank: int, curve: Curve | None
) -> KVListener:
    port = settings.kv_port and settings.kv_port + rank
    try:
        return KVListener(context, settings.kv_host, port, curve)
    except zmq.ZMQError as error:
        rule = f"a port that is free on {settings.kv_host}, like those of further ranks ({error.strerror})"
        raise ConfigError("kv_port", port, rule) from None  # the worker shows the first error of a process


def _is_of(name: str, base: str) -> bool:
    return name.rpartition("/")[0] == base
