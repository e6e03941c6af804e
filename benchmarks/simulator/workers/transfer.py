"""A prompt's or a running sequence's KV on its way to a decode worker, as bytes of a flow (`common/engine/transfer`).

The sender announces it, the decode worker grants room, and from then on each block crosses as soon as it is
computed. Each end gets a command when the transfer ends, after the time that a message takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.simulator.world.network import Flow
from benchmarks.simulator.world.world import TransferEnd, World


@dataclass(frozen=True, slots=True)
class Announced:
    """To the decode worker: KV can come."""

    transfer: Transfer


@dataclass(frozen=True, slots=True)
class Arrived:
    """To the decode worker: all blocks are there, and the first token or those of a hand-over."""

    transfer: Transfer


@dataclass(frozen=True, slots=True)
class Advanced:
    """To the sender of a growing sequence: it was granted, or has `caught_up`."""

    transfer: Transfer
    caught_up: bool


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """To the sender: its blocks are no longer needed."""

    transfer: Transfer


@dataclass(frozen=True, slots=True)
class Failed:
    """To either: the other one gave up."""

    transfer: Transfer
    why: str


@dataclass(slots=True, eq=False)
class Transfer:
    """The KV of one request on its way from one worker to another.

    `num_ready` of `num_blocks` blocks are computed. Those from `first_block` on must cross; -1: not granted yet.
    Those before `first_kept` are out of the model's window, and nobody needs them.
    A `growing` sequence is decoded meanwhile: it has caught up once the receiver has all blocks that were full a moment
    ago, and has `num_tokens` tokens when it is computed.
    """

    world: World
    sender: TransferEnd
    receiver: TransferEnd
    request_id: str
    attempt: int
    num_blocks: int
    block_bytes: int
    num_ready: int = 0
    first_kept: int = 0
    first_block: int = -1
    num_tokens: int = 0
    growing: bool = False
    computed: bool = False
    over: bool = False
    opened_at: float = 0.0
    granted_at: float = 0.0
    _num_added: int = 0
    _has_caught_up: bool = False
    _flow: Flow | None = field(default=None, repr=False)

    def announce(self) -> None:
        self.opened_at = self.world.clock.now
        self.world.soon(lambda: self.receiver.take(Announced(self)))

    def grant(self, first_block: int) -> None:
        """The decode worker has room, and the blocks before `first_block`."""
        self.granted_at = self.world.clock.now
        self.world.soon(lambda: self._granted(first_block))

    def progress(self, num_ready: int, *, computed: bool = False) -> None:
        """The sender has computed more blocks, or all and the tokens behind them."""
        self.num_ready, self.computed = num_ready, computed
        self._ship()

    @property
    def num_received(self) -> int:
        """Leading blocks that the decode worker has."""
        crossed = int(self._flow.num_crossed // self.block_bytes) if self._flow else 0
        return max(0, self.first_block) + crossed

    def acknowledge(self) -> None:
        """The decode worker needs nothing more."""
        self._close()
        self.world.soon(lambda: self.sender.take(Acknowledged(self)))

    def fail(self, *, by_sender: bool, why: str) -> None:
        """One of the two gives up, and sends the other a command."""
        if self.over:
            return
        self._close()
        other = self.receiver if by_sender else self.sender
        self.world.soon(lambda: other.take(Failed(self, why)))

    def drop(self) -> None:
        """One of the two is gone, and the other gets no command."""
        self._close()

    # ------------------------------------------------------------ inside

    def _granted(self, first_block: int) -> None:
        if self.over:
            return
        self.first_block = self._num_added = first_block
        self._flow = self.world.network.open(self.sender.outbound, self.receiver.inbound, self._on_empty)
        if self.growing:
            self.sender.take(Advanced(self, caught_up=False))
        self._ship()

    def _ship(self) -> None:
        if self._flow is None or self.over:
            return
        num_new, self._num_added = self.num_ready - self._num_added, max(self.num_ready, self._num_added)
        if num_new > 0:
            self.world.network.add(self._flow, num_new * self.block_bytes)
        elif self._flow.left <= 0.0:
            self._on_empty()

    def _on_empty(self) -> None:
        delay_s = self.world.scenario.message_s + self.world.scenario.link_s
        if self.computed and not self.over:
            self.world.clock.after(delay_s, self._arrive)
        elif self.growing and not self._has_caught_up:
            self._has_caught_up = True
            self.world.clock.after(delay_s + self.world.scenario.message_s, self._caught_up)

    def _caught_up(self) -> None:
        """The receiver's answer behind all full blocks has come back."""
        if not self.over:
            self.sender.take(Advanced(self, caught_up=True))

    def _arrive(self) -> None:
        if not self.over:
            self.receiver.take(Arrived(self))

    def _close(self) -> None:
        self.over = True
        if self._flow is not None:
            self.world.network.close(self._flow)
