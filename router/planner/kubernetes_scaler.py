"""Sets the replicas of each pool's Deployment through the scale subresource. Only the elected leader does so.

Pools whose workers span several pods use a LeaderWorkerSet, named `leaderworkersets/NAME`. Requires permission to get
and patch `deployments/scale` (or `leaderworkersets/scale`), to list pods, and to use one Lease.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from common.cluster import KubernetesClient, KubernetesError, Lease
from common.config import RouterConfig
from common.wire import Role

S = TypeVar("S", bound=msgspec.Struct)
log = logging.getLogger(__name__)

LWS, LWS_API = "leaderworkersets/", "leaderworkerset.x-k8s.io/v1"
"""Name prefix and API of LeaderWorkerSets, whose workers span several pods."""
LEAST_LEASE_S = 15
"""Minimum duration of the lease in seconds. Also at least three planning intervals."""


class _ScaleSpec(msgspec.Struct):
    replicas: int = 0


class _ScaleStatus(msgspec.Struct):
    selector: str = ""


class _Scale(msgspec.Struct):
    spec: _ScaleSpec = msgspec.field(default_factory=_ScaleSpec)
    status: _ScaleStatus = msgspec.field(default_factory=_ScaleStatus)


class _Condition(msgspec.Struct):
    type: str = ""
    status: str = ""
    reason: str = ""


class _PodStatus(msgspec.Struct):
    conditions: tuple[_Condition, ...] = ()


class _Pod(msgspec.Struct):
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)

    @property
    def is_unschedulable(self) -> bool:
        wanted = ("PodScheduled", "False", "Unschedulable")
        return any((each.type, each.status, each.reason) == wanted for each in self.status.conditions)


class _PodList(msgspec.Struct):
    items: tuple[_Pod, ...] = ()


class KubernetesScaler:
    """Scaler for the configured Deployments."""

    def __init__(self, client: KubernetesClient, namespace: str, deployments: Mapping[Role, str], lease: Lease) -> None:
        self._client, self._namespace, self._deployments, self._lease = client, namespace, deployments, lease
        self.unschedulable: dict[Role, int] = {}
        self._problem = ""

    @classmethod
    def of(cls, config: RouterConfig) -> KubernetesScaler:
        """Create from the configuration. Raises ConfigError without a cluster or a namespace."""
        client = KubernetesClient(config.cluster)
        namespace = config.cluster.namespace(config.discovery_namespace, "discovery_namespace")
        named: dict[Role, str] = {"prefill": config.prefill_deployment, "decode": config.decode_deployment}
        deployments = {role: name for role, name in named.items() if name}
        holder = f"{socket.gethostname()}-{os.getpid()}"
        duration_s = max(LEAST_LEASE_S, round(3 * config.planner_interval_s))
        return cls(client, namespace, deployments, Lease(client, namespace, config.planner_lease, holder, duration_s))

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        """Apply the wanted numbers if this router is the leader, and count unschedulable pods."""
        try:
            is_leader = await self._lease.hold()
            for role, name in self._deployments.items():
                if role in wanted:
                    await self._scale(role, name, wanted[role], may_change=is_leader)
        except KubernetesError as error:
            if str(error) != self._problem:
                log.warning("planner: cannot scale the pools, retrying at the next plan: %s", error)
            self._problem = str(error)
        else:
            if self._problem:
                log.info("planner: scaling the pools works again")
            self._problem = ""

    async def close(self) -> None:
        """Release the lease, so that another router can take over immediately."""
        try:
            await self._lease.release()
        except KubernetesError as error:
            log.info("planner: cannot release the lease, another router takes over when it expires: %s", error)
        await self._client.close()

    async def _scale(self, role: Role, name: str, wanted: int, *, may_change: bool) -> None:
        group = LWS_API if name.startswith(LWS) else "apps/v1"
        kind, _, bare = name.rpartition("/")
        path = f"/apis/{group}/namespaces/{self._namespace}/{kind or 'deployments'}/{bare}/scale"
        found = await self._get(path, {}, _Scale)
        if may_change and found.spec.replicas != wanted:
            await self._client.merge_patch(path, {"spec": {"replicas": wanted}})
            fields = {"replicas": wanted, "before": found.spec.replicas}
            log.info("planner: scaled %s from %d to %d replicas", name, found.spec.replicas, wanted, extra=fields)
        selector = {"labelSelector": found.status.selector, "fieldSelector": "status.phase=Pending", "limit": "500"}
        pods = await self._get(f"/api/v1/namespaces/{self._namespace}/pods", selector, _PodList)
        self.unschedulable[role] = sum(pod.is_unschedulable for pod in pods.items)

    async def _get(self, path: str, params: Mapping[str, str], kind: type[S]) -> S:
        try:
            return msgspec.json.decode(await self._client.get(path, params), type=kind)
        except msgspec.MsgspecError as error:
            raise KubernetesError(f"{path}: invalid answer: {error}") from error
