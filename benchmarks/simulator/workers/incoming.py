"""KV that comes to a decode worker, for prompts and in hand-overs. It models `decode_worker/remote_prefill.py`."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.simulator.workers.transfer import Transfer
from benchmarks.simulator.world.world import World
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import DecodeSequence, RequestStatus

EARLY_S = 10.0
"""How long an announcement is kept whose request has not come."""


class IncomingTransfers:
    """`_open` are those that were announced, of the present attempts."""

    def __init__(self, world: World, scheduler: DecodeScheduler) -> None:
        self._world, self._scheduler = world, scheduler
        self._open: dict[str, Transfer] = {}
        self._early: dict[tuple[str, int], tuple[float, Transfer]] = {}

    @property
    def drops(self) -> list[Callable[[], None]]:
        """What drops each transfer."""
        return [transfer.drop for transfer in self._open.values()]

    def expect(self, sequence: DecodeSequence) -> None:
        """Process the announcement of a request, if it came before."""
        now = self._world.clock.now
        self._early = {key: early for key, early in self._early.items() if early[0] > now}
        early = self._early.pop((sequence.request_id, sequence.attempt), None)
        if early is not None:
            self.on_announced(early[1])

    def on_announced(self, transfer: Transfer) -> None:
        sequence = self._scheduler.find(transfer.request_id)
        if transfer.over:
            return
        if sequence is None or sequence.attempt < transfer.attempt:
            self._early[transfer.request_id, transfer.attempt] = (self._world.clock.now + EARLY_S, transfer)
        elif sequence.attempt > transfer.attempt:
            transfer.fail(by_sender=False, why="superseded by a new attempt")
        elif not sequence.is_incoming:
            transfer.acknowledge()
        else:
            self._open[transfer.request_id] = transfer
            sequence.opened_at = self._world.clock.now
            needed = self._scheduler.window.first_block(sequence.num_request_tokens)
            first_block = max(transfer.first_kept, needed)
            if sequence.status is RequestStatus.EXPECTING:
                self._scheduler.open(sequence, first_block)
            elif sequence.status is RequestStatus.TRANSFERRING:
                self._scheduler.skip_to(sequence, first_block)
                self.grant(sequence, sequence.num_received_blocks)

    def on_arrived(self, transfer: Transfer) -> DecodeSequence | None:
        """Let a sequence whose KV has arrived join the running batch; None if its attempt has ended meanwhile."""
        sequence = self._present(transfer)
        if sequence is None:
            return None
        now = self._world.clock.now
        del self._open[transfer.request_id]
        transfer.acknowledge()
        sequence.lent = False
        sequence.transfer_s = now - transfer.granted_at
        sequence.first_token_at = now
        num_new = transfer.num_tokens - sequence.num_tokens if transfer.growing else 1
        sequence.token_ids.extend((0,) * (num_new - 1))
        self._scheduler.start_decoding(sequence)
        sequence.token_ids.append(0)
        return sequence

    def on_failed(self, transfer: Transfer) -> DecodeSequence | None:
        """The sender gave up: the sequence that has to fail, if it is still here."""
        sequence = self._present(transfer)
        if sequence is not None:
            self.release(sequence, "")
        return sequence

    def grant(self, sequence: DecodeSequence, first_block: int) -> None:
        """Let the sender ship the blocks of a sequence from `first_block` on."""
        sequence.lent = True
        sequence.granted_at = self._world.clock.now
        self._open[sequence.request_id].grant(first_block)

    def release(self, sequence: DecodeSequence, why: str) -> None:
        """Take a sequence's blocks back from its transfer; with `why`, tell the sender."""
        transfer = self._open.pop(sequence.request_id, None)
        if transfer is not None:
            if sequence.status is RequestStatus.TRANSFERRING:
                sequence.num_received_blocks = min(transfer.num_received, len(sequence.blocks))
            if why:
                transfer.fail(by_sender=False, why=why)
            else:
                transfer.drop()
            sequence.lent = False

    def _present(self, transfer: Transfer) -> DecodeSequence | None:
        """The sequence of a transfer that is still the present one."""
        if self._open.get(transfer.request_id) is not transfer:
            return None
        return self._scheduler.find(transfer.request_id)
