"""Events in order, gaps, snapshots, and workers that live again."""

from __future__ import annotations

from collections.abc import Callable

from common.engine.kv.block_log import BlockLog
from common.wire.messages import BlockEvents, WorkerHeartbeat
from router.fleet.prefix_index import ASK_AGAIN_S, BlockReports, PrefixIndex
from router.fleet.registry import WorkerRegistry
from router.fleet.worker_monitor import WorkerMonitor

from ...fake_worker import heartbeat_of, hello_of


def beat(sequence: int, epoch: int = 1) -> WorkerHeartbeat:
    return heartbeat_of(epoch=epoch, block_sequence=sequence)


def block(number: int) -> bytes:
    return number.to_bytes(8, "big")


class Rig:
    """A router that follows one worker's log."""

    def __init__(self, epoch: int = 1, max_changes: int = 100) -> None:
        self.index = PrefixIndex()
        self.reports = BlockReports(self.index)
        self.log = BlockLog(epoch, max_changes)
        self.reports.begin("w", epoch)

    def tell(self, events: list[BlockEvents] | None = None) -> None:
        for event in self.log.take() if events is None else events:
            self.reports.on_events("w", event)

    def asks(self, now: float = 0.0) -> bool:
        return self.reports.begin_snapshot("w", beat(self.log.sequence), now)

    def answer(self) -> None:
        for piece in self.log.snapshot():
            self.reports.on_snapshot("w", piece)

    def holds(self, *numbers: int) -> bool:
        return all(self.index.hits([block(number)]).num_blocks("w") for number in numbers)

    def reaches(self, number: int) -> bool:
        """Whether the block is in memory or in a tier."""
        return self.index.hits([block(number)]).num_reachable("w") == 1


def test_events_in_order_need_no_snapshot() -> None:
    rig = Rig()
    assert not rig.asks(), "a worker's life begins with an empty cache"
    for number in (1, 2):
        rig.log.stored(block(number))
        rig.tell()
        assert rig.holds(number) and not rig.asks()
    rig.log.removed(block(1))
    rig.tell()
    assert not rig.holds(1) and rig.holds(2)


def test_a_router_that_comes_later_asks_once_and_gets_all() -> None:
    rig = Rig()
    rig.log.stored(block(1))
    rig.log.take()
    assert rig.asks(1.0) and not rig.asks(1.0 + ASK_AGAIN_S / 2)
    rig.answer()
    assert rig.holds(1) and not rig.asks(1.0 + ASK_AGAIN_S / 2)


def test_a_lost_event_is_noticed_with_the_next_heartbeat() -> None:
    rig = Rig()
    rig.log.stored(block(1))
    rig.log.take()
    rig.log.stored(block(2))
    rig.tell()
    assert not rig.holds(2) and rig.asks(), "events behind a gap are left out"
    rig.answer()
    rig.log.stored(block(3))
    rig.tell()
    assert rig.holds(1, 2, 3)


def test_an_overflow_is_a_gap() -> None:
    rig = Rig(max_changes=1)
    rig.log.stored(block(1))
    rig.log.stored(block(2))
    rig.tell()
    assert rig.asks()
    rig.answer()
    assert rig.holds(1, 2) and not rig.asks()


def test_a_snapshot_that_does_not_come_is_asked_for_again() -> None:
    rig = Rig()
    rig.log.stored(block(1))
    rig.log.take()
    assert rig.asks(1.0) and not rig.asks(1.9) and rig.asks(2.0)


def test_a_snapshot_of_which_a_piece_is_lost_does_not_count() -> None:
    rig = Rig()
    for number in range(20_000):
        rig.log.stored(block(number))
    rig.log.take()
    pieces = rig.log.snapshot()
    assert rig.asks(1.0)
    for piece in (*pieces[:1], *pieces[2:]):
        rig.reports.on_snapshot("w", piece)
    assert rig.asks(3.0)
    rig.answer()
    assert not rig.asks(9.0) and rig.index.size("w") == 20_000


def test_a_block_that_left_meanwhile_is_gone_after_a_snapshot() -> None:
    rig = Rig()
    for number in (1, 2):
        rig.log.stored(block(number))
    rig.tell()
    rig.log.removed(block(1))
    rig.log.take()
    assert rig.asks()
    rig.answer()
    assert rig.holds(2) and not rig.holds(1)


def test_the_cache_is_cleared() -> None:
    rig = Rig()
    rig.log.stored(block(1))
    rig.tell()
    rig.log.cleared()
    rig.log.stored(block(2))
    rig.tell()
    assert not rig.holds(1) and rig.holds(2)


def test_messages_of_another_life_or_an_unknown_worker_do_nothing() -> None:
    rig = Rig()
    rig.log.stored(block(1))
    events, pieces = rig.log.take(), rig.log.snapshot()
    rig.reports.begin("w", 2)
    rig.tell(events)
    rig.reports.on_snapshot("w", pieces[0])
    assert not rig.holds(1)
    assert not rig.reports.begin_snapshot("w", beat(5, epoch=1), 0.0)
    rig.reports.end("w")
    rig.tell(events)
    rig.reports.on_snapshot("w", pieces[0])
    assert rig.index.is_empty and not rig.reports.begin_snapshot("w", beat(5, epoch=2), 0.0)


class Deaf:
    """A listener to whom nothing matters, and a worker that is sent nothing."""

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *arguments: True


def test_a_worker_with_another_role_begins_with_an_empty_cache() -> None:
    index, registry = PrefixIndex(), WorkerRegistry([], ["w"], worker_timeout_s=2.0)
    lives = WorkerMonitor(registry, index, Deaf(), lambda address: None, lambda address, message: True)
    for epoch, role in enumerate(("decode", "prefill", "decode"), 1):
        lives.on_message("w", hello_of("w", role, epoch=epoch, home="decode"), 0.0)
        assert registry.workers["w"].role == role and index.is_empty
        lives.on_message("w", BlockEvents(epoch=epoch - 1, sequence=2, stored=block(9)), 0.0)
        lives.on_message("w", BlockEvents(epoch=epoch, sequence=1, stored=block(epoch)), 0.0)
        held = [number for number in (1, 2, 3, 9) if index.hits([block(number)]).num_blocks("w")]
        assert held == [epoch]


def test_what_leaves_memory_for_a_tier_is_still_reached() -> None:
    rig = Rig()
    for number in (1, 2):
        rig.log.stored(block(number))
        rig.log.in_tier(block(number), True)
    rig.tell()
    rig.log.removed(block(1))
    rig.tell()
    assert rig.holds(2) and not rig.holds(1)
    assert rig.reaches(1) and rig.reaches(2)
    rig.log.in_tier(block(1), False)
    rig.log.in_tier(block(2), False)
    rig.tell()
    assert rig.holds(2) and not rig.reaches(1)


def test_a_snapshot_tells_of_tiers() -> None:
    rig = Rig(max_changes=2)
    for number in (1, 2, 3):
        rig.log.in_tier(block(number), True)
    rig.tell()
    rig.log.stored(block(3))
    rig.tell()
    assert rig.asks() and not rig.reaches(1)
    rig.answer()
    assert rig.reaches(1) and rig.reaches(2) and rig.holds(3) and not rig.holds(1)
    rig.log.cleared()
    rig.tell()
    assert rig.index.is_empty
