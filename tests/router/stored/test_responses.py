"""The store of responses: its bounds, its owners, its conversations, and what a crash or a damaged file does to it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.machine.wall_clock import AGES_S, LEASES_S, WallClock
from router.stored import database
from router.stored.database import LEASE_S
from router.stored.errors import ConversationGone, ConversationTooLong, StoreFailed
from router.stored.records import ROW_BYTES, StoredResponse
from router.stored.responses import ResponseStore

Open = Callable[..., ResponseStore]
KIB = 1024


class Clock:
    """The wall clock is `jump` ahead of the clock that nobody sets."""

    now, jump = 1e9, 0.0

    def __call__(self) -> float:
        return self.now + self.jump

    def of_store(self) -> WallClock:
        return WallClock(self, lambda: self.now)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def failures() -> list[str]:
    return []


@pytest.fixture
def open_store(tmp_path: Path, clock: Clock, failures: list[str]) -> Iterator[Open]:
    opened: list[ResponseStore] = []

    def run(path: str | None = None, **bounds: Any) -> ResponseStore:
        settings: dict[str, Any] = {
            "max_bytes": 1024 * KIB,
            "max_entries": 1000,
            "max_age_s": 3600.0,
            "chore_s": 3600.0,
        }
        store = ResponseStore(
            path or str(tmp_path / "r.sqlite3"), failures.append, clock=clock.of_store(), **(settings | bounds)
        )
        opened.append(store)
        return store

    yield run
    for store in opened:
        store.close()


def response(name: str, owner: str = "alice", *, previous: str | None = None, size: int = 2, **more: Any) -> Any:
    values = {"status": "completed", "input": b"[" + b" " * (size - 2) + b"]", "head": b"{}"}
    return StoredResponse(name, owner, previous=previous, **(values | more))


async def kept(store: ResponseStore, *names: str, owner: str = "alice") -> list[str]:
    return [name for name in names if await store.find(name, owner) is not None]


def maintain(store: ResponseStore) -> None:
    """What the store's thread does every few seconds."""
    store._database.submit(store._maintain).result(10)


async def test_what_is_kept_is_found_by_its_owner_alone(open_store: Open) -> None:
    store = open_store()
    record = response("a", head=b'{"x": 1}', output=b"[2]", previous="z", background=True)
    store.keep(record)
    assert await store.find("a", "alice") == (record, False)
    assert await store.find("a", "bob") is None and not await store.delete("a", "bob")
    assert await store.conversation("a", "bob", 10**6) == []
    assert await store.delete("a", "alice") and await store.find("a", "alice") is None
    assert not await store.delete("a", "alice")
    assert store.size.num_entries == store.size.num_bytes == 0


@pytest.mark.parametrize("path", [None, database.IN_MEMORY])
async def test_a_conversation_is_its_turns_in_order(open_store: Open, path: str | None) -> None:
    store = open_store(path)
    for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("other", "a")):
        store.keep(response(name, previous=previous, input=name.encode()))
    assert [turn.input for turn in await store.conversation("c", "alice", 10**6)] == [b"a", b"b", b"c"]
    assert [turn.id for turn in await store.conversation("other", "alice", 10**6)] == ["a", "other"]
    assert await store.conversation("none", "alice", 10**6) == []


async def test_a_conversation_without_its_beginning_is_refused(open_store: Open) -> None:
    store = open_store()
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        store.keep(response(name, previous=previous))
    await store.delete("a", "alice")
    with pytest.raises(ConversationGone) as caught:
        await store.conversation("c", "alice", 10**6)
    assert caught.value.missing == "a"
    assert [turn.id for turn in await store.turns_left("c", "alice", 10**6)] == ["b", "c"]


async def test_no_conversation_leads_through_another_keys_responses(open_store: Open) -> None:
    store = open_store()
    store.keep(response("a", "bob"))
    store.keep(response("b", previous="a"))
    with pytest.raises(ConversationGone):
        await store.conversation("b", "alice", 10**6)


async def test_a_long_conversation_is_refused_with_its_numbers(open_store: Open) -> None:
    store = open_store()
    store.keep(response("a", size=1000))
    store.keep(response("b", previous="a", size=1000))
    with pytest.raises(
        ConversationTooLong, match=r"2 responses and 2,004 bytes; the maximum is 10,000 responses and 2,003"
    ):
        await store.conversation("b", "alice", 2003)
    assert len(await store.conversation("b", "alice", 2004)) == 2


async def test_a_circle_ends(open_store: Open) -> None:
    """No client can make one: ids are chosen here. A file that was tampered with must not hang the thread."""
    store = open_store()
    store.keep(response("a", previous="b"))
    store.keep(response("b", previous="a"))
    with pytest.raises(ConversationTooLong):
        await store.conversation("a", "alice", 10**9)


async def test_responses_expire_after_their_last_use(open_store: Open, clock: Clock) -> None:
    store = open_store()
    store.keep(response("a"))
    store.keep(response("lonely"))
    await kept(store, "a")
    clock.now += 3000
    store.keep(response("b", previous="a"))
    await store.conversation("b", "alice", 10**6)
    clock.now += 3000
    assert await kept(store, "a", "b", "lonely") == ["a", "b"]
    assert store.size.num_entries == 3
    maintain(store)
    assert store.size.num_entries == 2


@pytest.mark.parametrize("jump", [1e6, -1e6])
async def test_a_clock_that_jumps_ages_nothing_and_ends_no_answer(open_store: Open, clock: Clock, jump: float) -> None:
    mine, other = open_store(), open_store()
    mine.keep(response("a"))
    await mine.begin(response("run", status="in_progress"))
    maintain(mine)
    maintain(other)
    clock.jump = jump
    for _ in range(20):
        assert await kept(other, "a") == ["a"] and (await other.find("run", "alice") or ())[1] is False
        maintain(other)
        maintain(mine)
        clock.now += 3
    clock.now += LEASES_S  # its router ends
    assert (await other.find("run", "alice") or ())[1] is True
    clock.now += AGES_S
    assert await kept(other, "a") == ([] if jump > 0 else ["a"])


async def test_the_number_is_bounded(open_store: Open, clock: Clock) -> None:
    store = open_store(max_entries=3)
    for name in "abcde":
        clock.now += 1
        store.keep(response(name))
    assert await kept(store, *"abcde") == ["c", "d", "e"]
    assert store.size.num_entries == 3


async def test_bytes_are_bounded_and_the_largest_owner_makes_room(open_store: Open, clock: Clock) -> None:
    store = open_store(max_bytes=100 * KIB)
    store.keep(response("small", "bob"))
    for name in "abcdef":
        clock.now += 1
        store.keep(response(name, size=20 * KIB))
    assert await kept(store, *"abcdef") == ["c", "d", "e", "f"]
    assert await kept(store, "small", owner="bob") == ["small"]
    assert store.size.num_bytes == 4 * (20 * KIB + 4 + ROW_BYTES) + 6 + ROW_BYTES


async def test_one_response_cannot_take_the_room_of_all(open_store: Open, failures: list[str]) -> None:
    store = open_store(max_bytes=100 * KIB)
    store.keep(response("a"))
    store.keep(response("huge", size=26 * KIB))
    assert await kept(store, "a", "huge") == ["a"] and failures == ["too_large"]
    with pytest.raises(StoreFailed):
        await store.begin(response("huge", size=26 * KIB))


async def test_a_running_answer_is_kept_until_it_ends(open_store: Open, clock: Clock) -> None:
    store = open_store(max_entries=1)
    await store.begin(response("run", status="queued", background=True))
    store.note(response("run", status="in_progress", head=b'{"a": 1}'))
    clock.now += 1
    store.keep(response("other"))
    found = await store.find("run", "alice")
    assert found is not None and (found[0].status, found[0].head, found[1]) == ("in_progress", b'{"a": 1}', False)
    await store.finish(response("run", status="completed", output=b"[1]"))
    found = await store.find("run", "alice")
    assert found is not None and (found[0].status, found[0].output, found[1]) == ("completed", b"[1]", False)


async def test_an_answer_that_was_deleted_does_not_come_back(open_store: Open) -> None:
    store = open_store()
    await store.begin(response("run", status="queued"))
    assert await store.delete("run", "alice")
    await store.finish(response("run"))
    assert await store.find("run", "alice") is None and store.size.num_entries == 0


async def test_leases_are_renewed_and_without_that_an_answer_has_lapsed(open_store: Open, clock: Clock) -> None:
    mine, other = open_store(), open_store()
    await mine.begin(response("run", status="in_progress"))
    clock.now += LEASE_S - 1
    maintain(other)  # it renews its own leases only
    maintain(mine)
    clock.now += LEASE_S - 1
    assert (await other.find("run", "alice") or ())[1] is False
    clock.now += 2
    assert (await other.find("run", "alice") or ())[1] is True
    await mine.finish(response("run"))  # it was only slow
    assert (await other.find("run", "alice") or ())[1] is False


async def test_another_router_asks_for_a_cancellation(open_store: Open) -> None:
    mine, other = open_store(), open_store()
    asked: list[str] = []
    mine.on_cancel = asked.extend
    await mine.begin(response("run", status="in_progress"))
    await other.ask_to_cancel("run", "bob")
    maintain(mine)
    assert asked == []
    await other.ask_to_cancel("run", "alice")
    maintain(other)
    maintain(mine)
    assert asked == ["run"]


async def test_a_running_answer_that_another_router_deletes_is_cancelled(open_store: Open) -> None:
    mine, other = open_store(), open_store()
    asked: list[str] = []
    mine.on_cancel = asked.extend
    for name in ("deleted", "run", "ended"):
        await mine.begin(response(name, status="in_progress"))
    assert await mine.finish(response("ended")) and await other.delete("ended", "alice")
    assert await other.delete("deleted", "alice")
    maintain(other)
    maintain(mine)
    assert asked == ["deleted"] and not await mine.finish(response("deleted"))


async def test_a_restart_keeps_everything(open_store: Open) -> None:
    store = open_store()
    store.keep(response("a"))
    store.close()
    with pytest.raises(StoreFailed, match="closed"):
        await store.find("a", "alice")
    again = open_store()
    assert await kept(again, "a") == ["a"]
    again.keep(response("b"))
    assert await kept(again, "b") == ["b"] and again.size.num_entries == 2


PROGRAM = """
import os, signal, sys
from router.stored.records import StoredResponse
from router.stored.responses import ResponseStore
store = ResponseStore(sys.argv[1], max_bytes=10**7, max_entries=100, max_age_s=3600)
for number in range(50):
    store.keep(StoredResponse(f"r{number}", "alice", "completed", b"[]", b"{}"))
import asyncio
asyncio.run(store.begin(StoredResponse("run", "alice", "in_progress", b"[]", b"{}")))
os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_a_crash_keeps_everything(tmp_path: Path, repository: Path) -> None:
    path = str(tmp_path / "crash.sqlite3")
    command = [sys.executable, "-c", PROGRAM, path]
    done = await asyncio.to_thread(subprocess.run, command, cwd=repository, timeout=60)
    assert done.returncode == -signal.SIGKILL
    store = ResponseStore(path, max_bytes=10**7, max_entries=100, max_age_s=3600)
    try:
        assert len(await kept(store, *(f"r{number}" for number in range(50)))) == 50
        assert (await store.find("run", "alice") or ())[1] is False  # its lease still runs
    finally:
        store.close()


async def test_a_full_disk_costs_what_is_new(open_store: Open, failures: list[str]) -> None:
    store = open_store(max_bytes=10**9)
    store.keep(response("a"))
    await kept(store, "a")
    store._database.submit(lambda connection: connection.execute("PRAGMA max_page_count = 30").fetchall()).result(10)
    store.keep(response("b", size=200 * KIB))
    assert await kept(store, "a", "b") == ["a"] and failures == ["full"]
    with pytest.raises(StoreFailed) as caught:
        await store.begin(response("c", size=200 * KIB))
    assert caught.value.reason == "full"
    store._database.submit(lambda connection: connection.execute("PRAGMA max_page_count = 3000").fetchall()).result(10)
    store.keep(response("b", size=200 * KIB))
    assert await kept(store, "b") == ["b"]


async def test_a_disk_that_hangs_delays_nobody_for_ever(
    open_store: Open, failures: list[str], monkeypatch: Any
) -> None:
    store, go = open_store(), threading.Event()
    stuck = store._database.submit(lambda connection: go.wait(30))
    monkeypatch.setattr(database, "WAIT_S", 0.01)
    with pytest.raises(StoreFailed, match="did not respond"):
        await store.find("a", "alice")
    monkeypatch.setattr(database, "MAX_WAITING_BYTES", 10 * KIB)
    for number in range(10):
        store.keep(response(str(number), size=2 * KIB))
    assert failures.count("behind") == 7  # three of 2.5 KiB wait
    monkeypatch.setattr(database, "WAIT_S", 30)
    go.set()
    assert stuck.result(10)
    assert await kept(store, *map(str, range(10))) == ["0", "1", "2"]


async def test_a_cancelled_reader_leaves_the_thread_working(open_store: Open) -> None:
    store, go = open_store(), threading.Event()
    store._database.submit(lambda connection: go.wait(30))
    reader = asyncio.create_task(store.find("a", "alice"))
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    go.set()
    store.keep(response("a"))
    assert await kept(store, "a") == ["a"]


async def test_only_the_user_may_read_the_file(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    store.keep(response("a"))
    await kept(store, "a")
    modes = {name: os.stat(tmp_path / name).st_mode & 0o777 for name in os.listdir(tmp_path)}
    assert len(modes) == 3 and set(modes.values()) == {0o600}


async def test_what_is_deleted_is_not_left_in_the_file(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    store.keep(response("a", input=b"a secret"))
    await store.delete("a", "alice")
    store.close()
    assert b"a secret" not in (tmp_path / "r.sqlite3").read_bytes()


async def test_the_thread_survives_what_it_is_told_to_call(open_store: Open) -> None:
    store = open_store(chore_s=0.01)
    called = threading.Event()

    def fail(ids: object) -> None:
        called.set()
        raise RuntimeError("the loop is closed")

    store.on_cancel = fail
    await store.begin(response("run", status="in_progress"))
    await store.ask_to_cancel("run", "alice")
    assert await asyncio.to_thread(called.wait, 30)
    store.keep(response("a"))
    assert await kept(store, "a") == ["a"]
