"""Workers come to hold the adapters that a file names, whatever else asks for adapters, and whatever fails."""

from __future__ import annotations

import functools

import pytest

from common.errors import InvalidRequest, ModelNotFound, Unavailable
from router.dispatch.adapter_orders import Superseded
from router.fleet.adapters import Outcome
from router.models.adapters_file import AdapterEntry
from router.server.adapter_reconciler import FIRST_BACKOFF_S, LONGEST_BACKOFF_S, LOOK_S, AdapterReconciler

from ... import waiting

A, B = AdapterEntry("a", "/a", "small"), AdapterEntry("b", "/b", "small")


class ModelOrders:
    """A model whose workers carry out every order, or fail it with `error`."""

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}
        self.asked: list[tuple[str, str]] = []
        self.error: Exception | None = None

    def path_of(self, name: str) -> str:
        return self.paths.get(name, "")

    async def load(self, name: str, path: str, *, in_place: bool) -> Outcome:
        self.asked.append((name, path))
        if self.error is not None:
            raise self.error
        assert in_place or name not in self.paths
        self.paths[name] = path
        return Outcome((), (), 2, "d" * 32)

    async def unload(self, name: str) -> None:
        self.asked.append((name, ""))
        if self.error is not None:
            raise self.error
        del self.paths[name]


class Followed:
    """A reconciler on two models, whose time passes as a test says."""

    def __init__(self, *entries: AdapterEntry) -> None:
        self.now = 0.0
        self.small, self.large = ModelOrders(), ModelOrders()
        orders = {"small": self.small, "large": self.large}
        self.reconciler = AdapterReconciler(orders, entries, lambda: self.now)

    async def change(self, *entries: AdapterEntry) -> None:
        self.reconciler.change(entries)
        await self.reconciler.reconcile()


async def test_the_file_is_loaded_and_what_leaves_it_is_unloaded() -> None:
    one = Followed(A, B)
    await one.reconciler.reconcile()
    await one.reconciler.reconcile()
    assert (one.small.paths, len(one.small.asked)) == ({"a": "/a", "b": "/b"}, 2)
    await one.change(B)
    assert one.small.paths == {"b": "/b"}
    await one.change()
    assert one.small.paths == {}


async def test_what_others_loaded_stays() -> None:
    one = Followed(A)
    one.small.paths = {"flag": "/flag", "a": "/a"}
    await one.reconciler.reconcile()
    assert one.small.asked == []  # workers have it already, by a flag or another router
    await one.change(B)
    assert one.small.paths == {"flag": "/flag", "b": "/b"}
    one.small.paths["b"] = "/from an endpoint"
    await one.change()
    assert one.small.paths["b"] == "/from an endpoint"


@pytest.mark.parametrize("new", [AdapterEntry("a", "/new", "small"), AdapterEntry("a", "/a", "small", "2")])
async def test_another_path_or_revision_is_loaded_in_place(new: AdapterEntry) -> None:
    one = Followed(A)
    await one.reconciler.reconcile()
    await one.change(new)
    await one.reconciler.reconcile()
    assert one.small.asked == [("a", "/a"), ("a", new.path)]


async def test_an_adapter_moves_to_another_model() -> None:
    one = Followed(A)
    await one.reconciler.reconcile()
    await one.change(AdapterEntry("a", "/a", "large"))
    assert (one.small.paths, one.large.paths) == ({}, {"a": "/a"})


@pytest.mark.parametrize(
    ("error", "waits_s"),
    [
        (Unavailable("no worker is ready"), (LOOK_S, LOOK_S, LOOK_S)),
        (InvalidRequest("no such folder"), (FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S, 4 * FIRST_BACKOFF_S)),
    ],
)
async def test_what_fails_is_tried_again_and_said_once(
    caplog: pytest.LogCaptureFixture, error: Exception, waits_s: tuple[float, ...]
) -> None:
    one = Followed(A)
    one.small.error = error
    for wait_s in waits_s:
        await one.reconciler.reconcile()
        one.now += 0.9 * wait_s
        await one.reconciler.reconcile()
        one.now += 0.1 * wait_s
    assert len(one.small.asked) == 3
    said = [f"adapter a: order failed, will be retried: {error}"]
    is_only_early = isinstance(error, Unavailable)
    assert [record.getMessage() for record in caplog.records] == ([] if is_only_early else said)
    one.small.error = None
    await one.reconciler.reconcile()
    assert one.small.paths == {"a": "/a"}


async def test_the_delay_is_bounded_and_short_again_after_a_success() -> None:
    one = Followed(A)
    one.small.error = InvalidRequest("no such folder")
    for _ in range(20):
        await one.reconciler.reconcile()
        one.now += LONGEST_BACKOFF_S
    assert len(one.small.asked) == 20
    one.small.error = None
    await one.reconciler.reconcile()
    one.small.error = InvalidRequest("it is being loaded")
    await one.change()
    one.now += FIRST_BACKOFF_S
    await one.reconciler.reconcile()
    assert len(one.small.asked) == 23


async def test_a_changed_file_is_tried_at_once() -> None:
    one = Followed(A)
    one.small.error = InvalidRequest("no such folder")
    await one.reconciler.reconcile()
    one.small.error = None
    await one.change(AdapterEntry("a", "/right", "small"))
    assert one.small.paths == {"a": "/right"}


async def test_another_router_that_follows_the_same_file_may_be_first() -> None:
    one = Followed(A)
    await one.reconciler.reconcile()
    one.small.error = Superseded("another router changed it")
    await one.change(AdapterEntry("a", "/a", "small", "2"))
    one.small.error = ModelNotFound("it is gone")
    one.now += 2 * FIRST_BACKOFF_S
    await one.reconciler.reconcile()
    assert len(one.small.asked) == 2
    await one.change()
    await one.reconciler.reconcile()
    assert len(one.small.asked) == 3


async def test_an_unload_that_fails_is_tried_again() -> None:
    one = Followed(A)
    await one.reconciler.reconcile()
    one.small.error = InvalidRequest("it is being loaded")
    await one.change()
    assert one.small.paths == {"a": "/a"}
    one.small.error, one.now = None, FIRST_BACKOFF_S
    await one.reconciler.reconcile()
    assert one.small.paths == {}


until = functools.partial(waiting.until, patience_s=10.0)


async def test_the_task_follows_until_it_is_closed_and_a_bug_in_it_shows() -> None:
    one = Followed(A)
    one.reconciler.start()
    await until(lambda: bool(one.small.paths))
    await one.reconciler.close()
    assert one.reconciler.failure == ""
    two = Followed(A)
    two.small.error = RuntimeError("a bug")
    two.reconciler.start()
    await until(lambda: bool(two.reconciler.failure))
    assert "a bug" in two.reconciler.failure
    await two.reconciler.close()
