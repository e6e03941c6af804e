"""Deployments are scaled by one router at a time, against a small API server over HTTP."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.cluster.access import ClusterAccess
from common.cluster.api import KubernetesClient, KubernetesError
from common.cluster.lease import Lease
from common.config import RouterConfig
from common.errors import ConfigError
from router.planner.kubernetes_scaler import KubernetesScaler
from router.planner.loop import scaler_of
from router.planner.scaler import DeployedPools

from ...kubernetes_api import KubernetesAPI


@pytest.fixture
def api(tmp_path: Path) -> Iterator[KubernetesAPI]:
    api = KubernetesAPI(tmp_path / "serviceaccount").start()
    api.replicas = {"p": 1, "d": 2}
    yield api
    api.stop()


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
async def lease_of(api: KubernetesAPI, clock: list[float]) -> AsyncIterator[Callable[[str], Lease]]:
    """A process's view of one Lease, by the name of the process."""
    clients: list[KubernetesClient] = []

    def make(holder: str) -> Lease:
        clients.append(KubernetesClient(ClusterAccess(api.url, api.folder)))
        return Lease(clients[-1], api.namespace, "planner", holder, 15, clock=lambda: clock[0])

    yield make
    for client in clients:
        await client.close()


def scaler(api: KubernetesAPI, lease: Lease) -> KubernetesScaler:
    return KubernetesScaler(lease._client, api.namespace, {"prefill": "p", "decode": "d"}, lease)


@pytest.mark.slow
async def test_one_of_two_holds_the_lease_until_it_is_silent(
    api: KubernetesAPI, lease_of: Callable[[str], Lease], clock: list[float]
) -> None:
    first, second = lease_of("a"), lease_of("b")
    assert await first.hold() and not await second.hold()
    clock[0] = 10.0
    assert await first.hold() and not await second.hold()
    clock[0] = 24.0
    assert not await second.hold(), "renewed 14 s ago, as seen here"
    clock[0] = 26.0
    assert await second.hold() and not await first.hold()
    assert api.leases["planner"]["spec"]["leaseTransitions"] == 1
    await second.release()
    assert await first.hold()


@pytest.mark.slow
async def test_of_two_that_try_at_once_one_wins(
    api: KubernetesAPI, lease_of: Callable[[str], Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = lease_of("a"), lease_of("b")
    read = await second._read()
    assert await first.hold() and read is None

    async def late() -> None:
        return read

    monkeypatch.setattr(second, "_read", late)
    assert not await second.hold(), "it exists already"
    stale = await first._read()
    await first.hold()
    assert stale is not None and not await first._write(stale.metadata.resource_version, 0)


@pytest.mark.slow
async def test_a_set_of_groups_of_pods_is_scaled(api: KubernetesAPI, lease_of: Callable[[str], Lease]) -> None:
    """A pool whose workers are spread over several pods."""
    api.replicas = {"p": 1, "leaderworkersets/d": 2}
    lease = lease_of("a")
    both = KubernetesScaler(lease._client, api.namespace, {"prefill": "p", "decode": "leaderworkersets/d"}, lease)
    assert await both.deployed() == DeployedPools({"prefill": 1, "decode": 2}, {"prefill": 0, "decode": 0}, 0)
    await both.scale({"prefill": 2, "decode": 3})
    assert api.replicas == {"p": 2, "leaderworkersets/d": 3}


@pytest.mark.slow
def test_the_name_of_a_set_says_its_kind() -> None:
    names: dict[str, Any] = {"max_decode": 2, "planner": "kubernetes"}
    assert RouterConfig(**names, decode_deployment="leaderworkersets/d").decode_deployment == "leaderworkersets/d"
    with pytest.raises(ConfigError, match="decode_deployment='statefulsets/d': must be"):
        RouterConfig(**names, decode_deployment="statefulsets/d")


@pytest.mark.slow
async def test_the_leader_scales_and_all_see_what_finds_no_machine(
    api: KubernetesAPI, lease_of: Callable[[str], Lease], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    api.unschedulable = {"p": 2}
    leader, other = scaler(api, lease_of("a")), scaler(api, lease_of("b"))
    seen = [await one.deployed() for one in (leader, other)]
    assert [one and one.term for one in seen] == [0, None]
    assert all(one and one.unschedulable == {"prefill": 2, "decode": 0} for one in seen)
    await leader.scale({"prefill": 4, "decode": 2})
    await other.scale({"prefill": 9, "decode": 9})
    assert api.replicas == {"p": 4, "d": 2}
    assert [name for name, _ in api.patches] == ["p"], "what is as wanted is left alone"
    await leader.close()
    taken = await other.deployed()
    assert taken is not None and taken.term == 1 and taken.replicas == {"prefill": 4, "decode": 2}
    await other.scale({"prefill": 3, "decode": 1})
    assert api.replicas == {"p": 3, "d": 1}
    await other.resign()
    after = await other.deployed()
    assert after is not None and after.term is None, "it does not take the lease again"


@pytest.mark.slow
async def test_a_refusal_is_said_once_and_tried_again(
    api: KubernetesAPI, lease_of: Callable[[str], Lease], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    scales = scaler(api, lease_of("a"))
    assert await scales.deployed() is not None
    api.refusal = 403
    for _ in range(2):
        await scales.scale({"decode": 5})
        assert await scales.deployed() is None
    for verb in ("scale d", "read the pools"):
        assert caplog.text.count(f"cannot {verb},") == 1 and "HTTP 403" in caplog.text
    api.refusal = 0
    assert await scales.deployed() is not None and "can read the pools again" in caplog.text
    await scales.scale({"decode": 5})
    assert api.replicas["d"] == 5 and "can scale d again" in caplog.text
    api.stop()
    assert await scales.deployed() is None
    await scales.scale({"decode": 6})
    await scales.close()


async def test_a_pool_that_cannot_be_scaled_does_not_hold_the_other_up(
    api: KubernetesAPI, lease_of: Callable[[str], Lease], caplog: pytest.LogCaptureFixture
) -> None:
    leader = scaler(api, lease_of("a"))
    await leader.deployed()
    del api.replicas["p"]
    await leader.scale({"prefill": 2, "decode": 3})
    assert api.replicas == {"d": 3} and "cannot scale p, retrying" in caplog.text


async def test_sizes_that_another_program_sets_are_logged(
    api: KubernetesAPI, lease_of: Callable[[str], Lease], caplog: pytest.LogCaptureFixture
) -> None:
    leader = scaler(api, lease_of("a"))
    await leader.deployed()
    await leader.scale({"prefill": 4, "decode": 2})
    await leader.deployed()
    assert "changed" not in caplog.text
    api.replicas["p"] = 1
    await leader.deployed()
    assert "changed p from 4 to 1 replicas" in caplog.text and caplog.text.count("changed") == 1


async def test_a_missing_deployment_is_named(api: KubernetesAPI, lease_of: Callable[[str], Lease]) -> None:
    del api.replicas["p"]
    with pytest.raises(KubernetesError, match="no such deployment"):
        await scaler(api, lease_of("a"))._deployed()


@pytest.mark.parametrize(
    "settings",
    [
        {"planner": "kubernetes"},
        {"planner": "kubernetes", "decode_deployment": "d"},
        {"planner": "advice", "decode_deployment": "d", "max_decode": 3},
        {"planner": "kubernetes", "decode_deployment": "d", "max_decode": 3, "prefill_deployment": "p"},
        {"planner": "kubernetes", "decode_deployment": "d", "max_decode": 3, "planner_lease": ""},
        {"planner": "kubernetes", "decode_deployment": "D!", "max_decode": 3},
        {"min_prefill": 3, "max_prefill": 2},
        {"max_cost": 2.0, "min_prefill": 2},
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RouterConfig(**settings)


def test_the_scaler_of_a_router(api: KubernetesAPI) -> None:
    assert scaler_of(RouterConfig(planner="advice")) is None
    config = RouterConfig(
        planner="kubernetes",
        decode_deployment="d",
        max_decode=3,
        kubernetes_api=api.url,
        kubernetes_credentials=str(api.folder),
    )
    made = [scaler_of(config) for _ in range(2)]
    assert all(isinstance(one, KubernetesScaler) for one in made)
    holders = {one._lease._holder for one in made if isinstance(one, KubernetesScaler)}
    assert len(holders) == 2, "a restarted router is not taken for the one before"
