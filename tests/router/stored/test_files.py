"""Files and batches in the store: bounds, ages, leases between routers that share it, and results that count once."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.machine.wall_clock import AGES_S, LEASES_S, WallClock
from router.stored.database import LEASE_S
from router.stored.errors import FileInUse, StoreFull
from router.stored.files import FileStore
from router.stored.records import (
    BATCH_INPUT,
    CANCELLED,
    CANCELLING,
    COMPLETED,
    IN_PROGRESS,
    VALIDATING,
    BatchChanges,
    BatchUsage,
    LineResult,
    StoredBatch,
    StoredFile,
)


class Clock:
    """The wall clock is `jump` ahead of the clock that nobody sets."""

    now, jump = 1000.0, 0.0

    def __call__(self) -> float:
        return self.now + self.jump

    def of_store(self) -> WallClock:
        return WallClock(self, lambda: self.now)


Open = Callable[..., FileStore]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_store(tmp_path: Path, clock: Clock) -> Iterator[Open]:
    """Opens stores over one file; nothing happens by itself."""
    opened = []

    def store(**settings: Any) -> FileStore:
        bounds = {"max_bytes": 1_000_000, "max_entries": 20, "max_age_s": 100.0, "chore_s": 3600.0} | settings
        one = FileStore(str(tmp_path / "files.sqlite3"), clock=clock.of_store(), **bounds)
        opened.append(one)
        return one

    yield store
    for one in opened:
        one.close()


def file(name: str = "file-1", owner: str = "", *, now: float = 1000.0, age_s: float = 100.0) -> StoredFile:
    return StoredFile(name, owner, BATCH_INPUT, "in.jsonl", now, now + age_s)


def batch(name: str = "batch_1", input_file: str = "file-1", owner: str = "", now: float = 1000.0) -> StoredBatch:
    return StoredBatch(
        *(name, owner, VALIDATING, "/v1/completions", input_file, f"{name}-out", f"{name}-err"),
        created_at=now,
        expires_at=now + 86_400,
        result_s=100.0,
    )


def result(number: int, line: bytes = b"{}\n", *, is_good: bool = True) -> LineResult:
    return LineResult(number, line, is_good, BatchUsage(1, 0, 2, 0))


async def kept(store: FileStore, one: StoredFile, *pieces: bytes) -> StoredFile:
    await store.begin(one)
    for number, piece in enumerate(pieces):
        await store.append(one, number, piece)
    return await store.complete(one)


async def begun(store: FileStore, one: StoredBatch, total: int = 3) -> StoredBatch:
    await store.batches.create(one, lambda total, own: None)
    found = await store.batches.begin(one, total, "m")
    assert found is not None and found.status == IN_PROGRESS and found.model == "m"
    return found


def news_of(store: FileStore) -> list[BatchChanges]:
    told: list[BatchChanges] = []
    store.batches.on_news = told.append
    return told


async def test_a_file_is_seen_once_it_is_complete(open_store: Open) -> None:
    store = open_store()
    one = file()
    await store.begin(one)
    await store.append(one, 0, b"ab")
    assert await store.find(one.id, "") is None
    await store.append(one, 1, b"cd")
    assert (await store.complete(one)).num_bytes == 4
    assert await store.find(one.id, "another") is None
    assert await store.read(one.id, -1, 1) == [(0, b"ab")]
    assert await store.read(one.id, -1, 100) == [(0, b"ab"), (1, b"cd")]
    assert await store.read(one.id, 1, 100) == []


async def test_bytes_and_number_are_bounded_and_a_key_has_half(open_store: Open) -> None:
    store = open_store(max_bytes=100, max_entries=3)
    await kept(store, file("file-1", "a"), b"x" * 50)
    with pytest.raises(StoreFull, match=r"have 50 of 100 bytes, those of this key 50 of 50 bytes, and 1 more"):
        await store.begin(file("file-2", "a"), 1)
    await store.begin(file("file-3", "b"))
    await store.append(file("file-3", "b"), 0, b"x" * 40)
    with pytest.raises(StoreFull):
        await store.append(file("file-3", "b"), 1, b"x" * 11)
    assert (store.size.num_entries, store.size.num_bytes) == (2, 90)
    await store.begin(file("file-4", "c"))
    with pytest.raises(StoreFull, match="it has 3 of 3 files"):
        await store.begin(file("file-5", "c"))
    await store.abandon(file("file-3", "b"))
    assert (store.size.num_entries, store.size.num_bytes) == (2, 50)


async def test_what_is_deleted_counts_until_its_pieces_are_gone(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.stored.files.PURGED_ROWS", 4)
    store = open_store()
    one = await kept(store, file(), *[b"x" * 10] * 10)
    assert await store.delete(one.id, "") and await store.find(one.id, "") is None
    sizes = [store.size.num_bytes]
    while store.size.num_entries:
        await store.batches.look()
        await store._database.run(store._purge)
        sizes.append(store.size.num_bytes)
    assert sizes == [60, 20, 0]
    assert not await store.delete(one.id, "")


async def test_files_and_batches_have_their_age(open_store: Open, clock: Clock) -> None:
    store = open_store()
    await kept(store, file("file-1"), b"x")
    await store.begin(file("file-2"))
    done = await begun(store, batch())
    await store.batches.end(done, COMPLETED)
    waiting = await begun(store, batch("batch_2"))
    clock.now += 101
    assert await store.find("file-1", "") is None
    assert await store.page("", purpose=None, descending=True, limit=9, after=None) == []
    await store._database.run(store._maintain)
    assert await store.batches.find("batch_1", "") is None
    assert await store.read("file-1", -1, 1) == [(0, b"x")], "a batch reads it"
    await store.batches.end(waiting, COMPLETED)
    await store._database.run(store._maintain)
    assert await store.read("file-1", -1, 1) == []
    assert store.size.num_entries == 1, "an upload that nobody ended"
    clock.now += 7200
    await store._database.run(store._maintain)
    assert store.size.num_entries == 0


async def test_a_file_that_a_batch_reads_stays(open_store: Open) -> None:
    store = open_store()
    await kept(store, file(), b"x")
    running = await begun(store, batch())
    with pytest.raises(FileInUse, match="batch_1"):
        await store.delete("file-1", "")
    await store.batches.end(running, COMPLETED)
    assert await store.delete("file-1", "")


async def test_results_count_once_and_are_seen_at_the_end(open_store: Open) -> None:
    store = open_store()
    running = await begun(store, batch())
    good, bad = result(2, b"good\n"), result(1, b"bad\n", is_good=False)
    assert await store.batches.add(running, [good, bad]) and await store.batches.add(running, [good])
    assert await store.batches.finished(running) == {1, 2}
    now = await store.batches.find(running.id, "")
    assert now is not None and (now.num_total, now.num_completed, now.num_failed) == (3, 1, 1)
    assert now.usage == BatchUsage(2, 0, 4, 0) and not now.has_output
    assert await store.find(running.output_file, "") is None
    ended = await store.batches.end(running, COMPLETED)
    assert ended is not None and ended.has_output and ended.has_errors
    found = await store.find(running.output_file, "")
    assert found is not None and found.num_bytes == 5 and found.filename == "batch_1_output.jsonl"


async def test_an_empty_file_of_results_is_none(open_store: Open) -> None:
    store = open_store()
    running = await begun(store, batch())
    await store.batches.add(running, [result(1)])
    ended = await store.batches.end(running, COMPLETED)
    assert ended is not None and ended.has_output and not ended.has_errors
    assert await store.find(running.error_file, "") is None


async def test_a_lapsed_lease_is_anothers_and_the_first_writes_no_more(open_store: Open, clock: Clock) -> None:
    first, second = open_store(), open_store()
    running = await begun(first, batch())
    mine, theirs = news_of(first), news_of(second)
    second.batches.max_claimed = 5
    await second.batches.look()
    assert theirs[-1].claimed == []
    for _ in range(3):
        clock.now += 10
        await first.batches.look()
    await second.batches.look()
    assert theirs[-1].claimed == [] and mine[-1] == BatchChanges([], [], [])
    clock.now += 16
    await second.batches.look()
    assert [one.id for one in theirs[-1].claimed] == [running.id] and theirs[-1].claimed[0].num_total == 3
    assert not await first.batches.add(running, [result(1)])
    assert await first.batches.end(running, COMPLETED) is None and not await first.batches.finalize(running)
    await first.batches.look()
    assert mine[-1].lost == [running.id]
    assert await second.batches.add(running, [result(1)])


MONTH_S = 31 * 86400.0


async def test_a_clock_that_jumps_ahead_ages_nothing_for_an_hour(open_store: Open, clock: Clock) -> None:
    store = open_store(max_age_s=MONTH_S)
    await kept(store, file("file-1", age_s=MONTH_S), b"x")
    await store.begin(file("file-2"))
    await store.batches.end(await begun(store, batch()), COMPLETED)

    async def numbers() -> tuple[int, bool, bool]:
        await store._database.run(store._maintain)
        found = await store.find("file-1", ""), await store.batches.find("batch_1", "")
        return store.size.num_entries, found[0] is not None, found[1] is not None

    before = await numbers()
    clock.jump = 2 * MONTH_S
    assert await numbers() == before == (2, True, True)
    clock.now += 6
    assert await numbers() == before
    clock.jump = 0.0
    assert await numbers() == before
    clock.now += AGES_S
    clock.jump = 2 * MONTH_S
    assert await numbers() == before
    clock.now += AGES_S
    assert await numbers() == (0, False, False)


async def test_a_router_that_starts_with_a_wrong_clock_deletes_nothing_at_once(open_store: Open, clock: Clock) -> None:
    store = open_store()
    await kept(store, file("file-1"), b"x")
    store.close()
    clock.now += 101
    again = open_store()
    await again._database.run(again._maintain)
    assert await again.find("file-1", "") is not None
    clock.now += AGES_S
    await again._database.run(again._maintain)
    assert await again.find("file-1", "") is None and again.size.num_entries == 0


@pytest.mark.parametrize("jump", [MONTH_S, -MONTH_S, LEASE_S + 1])
async def test_a_clock_that_jumps_takes_no_batch_away(open_store: Open, clock: Clock, jump: float) -> None:
    first, second = open_store(), open_store()
    running = await begun(first, batch())
    mine, theirs = news_of(first), news_of(second)
    second.batches.max_claimed = 5
    await first.batches.look()
    await second.batches.look()
    clock.jump = jump
    for _ in range(30):
        clock.now += 3
        await second.batches.look()
        assert theirs[-1].claimed == [] and mine[-1].lost == []
        await first.batches.look()
    for _ in range(int(LEASES_S)):  # the first router is gone, whatever the clock says
        clock.jump = 0.0
        clock.now += 3
        await second.batches.look()
    claimed = [one.id for news in theirs for one in news.claimed]
    assert claimed == [running.id]


async def test_who_claims_no_more_than_it_may(open_store: Open, clock: Clock) -> None:
    first, second = open_store(), open_store()
    for number in range(3):
        await begun(first, batch(f"batch_{number}"))
    await first.batches.release()
    theirs = news_of(second)
    second.batches.max_claimed = 2
    await second.batches.look()
    assert [one.id for one in theirs[-1].claimed] == ["batch_0", "batch_1"], "a lease that was given up has run out"
    await second.batches.look()
    assert theirs[-1].claimed == []


async def test_a_batch_whose_creation_was_given_up_is_claimed(open_store: Open, clock: Clock) -> None:
    first, second = open_store(), open_store()
    begun, resumed = threading.Event(), threading.Event()

    def stall(total: int, own: int) -> None:
        begun.set()
        assert resumed.wait(30)

    creation = asyncio.create_task(first.batches.create(batch(), stall))
    assert await asyncio.to_thread(begun.wait, 30)
    creation.cancel()  # as after `WAIT_S`
    resumed.set()
    await first.batches.look()
    clock.now += LEASE_S - 1
    await first.batches.look()
    clock.now += 2
    theirs = news_of(second)
    second.batches.max_claimed = 5
    await second.batches.look()
    assert [one.id for one in theirs[-1].claimed] == ["batch_1"]


async def test_a_cancellation_reaches_the_router_that_works(open_store: Open) -> None:
    first, second = open_store(), open_store()
    running = await begun(first, batch())
    mine = news_of(first)
    asked = await second.batches.cancel(running.id, "")
    assert asked is not None and asked.status == CANCELLING
    assert await second.batches.cancel(running.id, "another") is None
    await first.batches.look()
    assert mine[-1].cancelled == [running.id]
    ended = await first.batches.end(running, COMPLETED)
    assert ended is not None and ended.status == CANCELLED, "its last answer came as its client cancelled it"


async def test_so_many_batches_are_kept(open_store: Open, clock: Clock) -> None:
    store = open_store(max_entries=8)
    for number in range(12):
        clock.now += 1
        await store.batches.end(await begun(store, batch(f"batch_{number}", now=clock.now)), COMPLETED)
    found = await store.batches.page("", limit=99, after=None)
    assert found is not None and [one.id for one in found] == [f"batch_{number}" for number in range(11, 3, -1)]


async def test_a_bound_of_batches_is_looked_at_in_the_same_transaction(open_store: Open) -> None:
    store = open_store()
    seen: list[tuple[int, int]] = []
    for number, owner in enumerate(("a", "a", "b")):
        await store.batches.create(batch(f"batch_{number}", owner=owner), lambda *counts: seen.append(counts))
    assert seen == [(0, 0), (1, 1), (2, 0)]

    def refuse(total: int, own: int) -> None:
        raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        await store.batches.create(batch("batch_9"), refuse)
    assert await store.batches.find("batch_9", "") is None


async def test_results_may_exceed_the_bound_by_a_fourth(open_store: Open) -> None:
    store = open_store(max_bytes=100)
    await kept(store, file(), b"x" * 100)
    running = await begun(store, batch())
    assert await store.batches.add(running, [result(1, b"x" * 25)])
    with pytest.raises(StoreFull):
        await store.batches.add(running, [result(2, b"x")])
    assert await store.batches.finished(running) == {1}


def test_another_file_of_ours_is_refused(tmp_path: Path) -> None:
    from router.stored.responses import ResponseStore

    path = str(tmp_path / "r.sqlite3")
    ResponseStore(path, max_bytes=1, max_entries=1, max_age_s=1).close()
    with pytest.raises(sqlite3.DatabaseError, match="another program"):
        FileStore(path, max_bytes=1, max_entries=1, max_age_s=1)
