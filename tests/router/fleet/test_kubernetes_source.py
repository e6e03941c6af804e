"""The source against an API server over real HTTP: what it publishes, and that no fault ends it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from router.fleet import kubernetes_source

from ...kubernetes_api import KubernetesAPI, endpoint

A, B = "tcp://10.0.0.1:7001", "tcp://10.0.0.2:7001"
Watch = Callable[..., Any]


@pytest.fixture(autouse=True)
def brief_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two tries."""
    monkeypatch.setattr(kubernetes_source, "BACKOFF_S", 0.05)


async def test_workers_come_and_go(api: KubernetesAPI, watch: Watch) -> None:
    api.put("d1", "decode", [endpoint("10.0.0.1")])
    api.put("other", "somebody-else", [endpoint("10.0.0.9")])
    watcher = watch()
    await watcher.until(lambda: watcher.addresses == [A])
    assert watcher.one().role == "decode" and not watcher.one().withheld
    api.put("p1", "prefill", [endpoint("10.0.0.2")])
    await watcher.until(lambda: watcher.addresses == [A, B])
    api.delete("d1")
    await watcher.until(lambda: watcher.addresses == [B])
    assert api.lists == 1


async def test_conditions_flip(api: KubernetesAPI, watch: Watch) -> None:
    api.put("d", "decode", [endpoint("10.0.0.1", ready=False, serving=False)])
    watcher = watch()
    await watcher.until(lambda: watcher.addresses == [A])
    assert watcher.one().withheld == "readiness probe failing"
    api.put("d", "decode", [endpoint("10.0.0.1")])
    await watcher.until(lambda: watcher.one().serving)
    api.put("d", "decode", [endpoint("10.0.0.1", ready=False, serving=True, terminating=True)])
    await watcher.until(lambda: watcher.one().terminating)
    assert watcher.one().serving and watcher.one().withheld == "terminating"


async def test_a_dropped_watch_is_begun_again_with_a_list(api: KubernetesAPI, watch: Watch) -> None:
    watcher = watch()
    await watcher.until(lambda: api.num_watches == 1)
    api.put("d", "decode", [endpoint("10.0.0.1")])
    await watcher.until(lambda: watcher.addresses == [A])
    api.drop_watches()
    await watcher.until(lambda: api.lists == 2 and api.num_watches == 1)
    api.put("d", "decode", [endpoint("10.0.0.1"), endpoint("10.0.0.2")])
    await watcher.until(lambda: watcher.addresses == [A, B])


@pytest.mark.slow
async def test_a_missed_delete_is_found_by_the_next_list(api: KubernetesAPI, watch: Watch) -> None:
    api.put("d", "decode", [endpoint("10.0.0.1")])
    watcher = watch(relist_s=1.0)
    await watcher.until(lambda: watcher.addresses == [A] and api.num_watches == 1)
    api.delete("d", silently=True)
    await watcher.until(lambda: watcher.addresses == [])


@pytest.mark.slow
@pytest.mark.parametrize("as_status", [False, True], ids=["event", "status"])
async def test_a_version_that_is_too_old_leads_to_a_list(api: KubernetesAPI, watch: Watch, as_status: bool) -> None:
    api.history_starts_at, api.expired_as_status = 1_000_000, as_status
    watcher = watch()
    await watcher.until(lambda: api.lists == 2)
    api.history_starts_at = 0
    await watcher.until(lambda: api.num_watches == 1)
    api.put("d", "decode", [endpoint("10.0.0.1")])
    await watcher.until(lambda: watcher.addresses == [A])


@pytest.mark.slow
async def test_it_keeps_what_it_knows_while_the_server_is_away(
    api: KubernetesAPI, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    api.put("d", "decode", [endpoint("10.0.0.1")])
    watcher = watch()
    await watcher.until(lambda: watcher.addresses == [A] and api.num_watches == 1)
    api.stop()
    status = watcher.source.status
    await watcher.until(lambda: status.num_syncs["failed"] >= 3)
    assert watcher.addresses == [A]
    assert "keeping 1 known workers" in caplog.text
    api.put("d", "decode", [endpoint("10.0.0.2")])  # while nobody can hear of it
    api.start()
    await watcher.until(lambda: watcher.addresses == [B])
    assert "works again" in caplog.text


@pytest.mark.slow
async def test_a_new_token_is_read(api: KubernetesAPI, watch: Watch) -> None:
    watcher = watch(relist_s=1.0)
    await watcher.until(lambda: watcher.addresses == [])
    api.rotate_token("second")
    api.put("d", "decode", [endpoint("10.0.0.1")])
    await watcher.until(lambda: watcher.addresses == [A] and watcher.source.status.num_syncs["ok"] > 2)
    assert watcher.source.status.num_syncs["failed"] == 0


@pytest.mark.parametrize(("code", "said"), [(401, "the token was rejected"), (403, "its Role needs list and watch")])
async def test_a_refusal_is_told_to_people(api: KubernetesAPI, watch: Watch, code: int, said: str) -> None:
    api.refusal = code
    watcher = watch()
    await watcher.until(lambda: watcher.source.status.error)
    missing = watcher.source.status.explain("decode", 0.0)
    assert f"HTTP {code}" in missing and said in missing and "decode could not be looked up yet" in missing
    api.refusal = 0
    await watcher.until(lambda: watcher.addresses == [])
    assert watcher.source.status.explain("decode", 0.0) == (
        "no decode worker exists: the decode service decode has no endpoints"
    )


@pytest.mark.parametrize(
    "garbage", [b"", b"<html>", b"[]", b'{"items":[{"metadata":3}]}', b"[" * 100_000, b'{"metadata":{},"items":null}']
)
async def test_garbage_for_a_list_changes_nothing(api: KubernetesAPI, watch: Watch, garbage: bytes) -> None:
    api.put("d", "decode", [endpoint("10.0.0.1")])
    watcher = watch()
    await watcher.until(lambda: watcher.addresses == [A] and api.num_watches == 1)
    api.garbage = garbage
    api.drop_watches()
    await watcher.until(lambda: watcher.source.status.num_syncs["failed"])
    assert watcher.addresses == [A]
    assert "not a SliceList" in watcher.source.status.error
    api.garbage = None
    await watcher.until(lambda: watcher.source.status.num_syncs["ok"] == 2)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "WHATEVER", "object": {}},
        {"type": "MODIFIED", "object": {"metadata": {"name": 5}}},
        {"type": "ERROR", "object": {"code": 500, "message": "etcd is unwell"}},
        {"object": {}},
    ],
)
async def test_a_senseless_event_leads_to_a_list(api: KubernetesAPI, watch: Watch, event: dict[str, Any]) -> None:
    watcher = watch()
    await watcher.until(lambda: api.num_watches == 1)
    api.send(event)
    await watcher.until(lambda: api.lists == 2 and api.num_watches == 1)


async def test_bookmarks_and_pages(api: KubernetesAPI, watch: Watch) -> None:
    api.page_size = 2
    for i in range(1, 6):
        api.put(f"d{i}", "decode", [endpoint(f"10.0.0.{i}")])
    watcher = watch()
    await watcher.until(lambda: watcher.addresses and len(watcher.addresses) == 5)
    assert api.lists == 3
    await watcher.until(lambda: api.num_watches == 1)
    api.send({"type": "BOOKMARK", "object": {"kind": "EndpointSlice", "metadata": {"resourceVersion": "9999"}}})
    api.delete("d1")
    await watcher.until(lambda: watcher.addresses and len(watcher.addresses) == 4)
    assert api.lists == 3


@pytest.mark.slow
async def test_a_body_that_takes_too_long_is_given_up(api: KubernetesAPI, watch: Watch) -> None:
    api.slow_s = 30.0
    watcher = watch(timeout_s=0.3)
    await watcher.until(lambda: watcher.source.status.num_syncs["failed"] >= 2)
    assert "within 0.3 s" in watcher.source.status.error
    api.slow_s = 0.0
    await watcher.until(lambda: watcher.addresses == [])
