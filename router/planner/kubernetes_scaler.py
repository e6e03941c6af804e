"""Sets the replicas of pools' Deployments through the scale subresource: the leader all sizes, others wake pools.

Pools whose workers span several pods use a LeaderWorkerSet, named `leaderworkersets/NAME`. Requires permission to get
and patch `deployments/scale` (or `leaderworkersets/scale`), to list pods, and to use one Lease.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Awaitable, Collection, Mapping
from typing import TypeVar

import msgspec

from common.cluster import KubernetesClient, KubernetesError, Lease
from common.config import RouterConfig
from common.wire import Role
from router.planner.scaler import DeployedPools

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
log = logging.getLogger(__name__)

LWS, LWS_API = "leaderworkersets/", "leaderworkerset.x-k8s.io/v1"
"""Name prefix and API of LeaderWorkerSets, whose workers span several pods."""
FOREIGN = (
    "planner: another router or program changed %s from %d to %d replicas, and the plan continues from there. "
    "If this repeats, look for an HPA or a GitOps tool that sets replicas"
)
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
        self._replicas: dict[Role, int] = {}
        self._problems: dict[str, str] = {}
        self._has_resigned = False
        self._term: int | None = None  # of the last read, None unless this router led

    @classmethod
    def of(cls, config: RouterConfig) -> KubernetesScaler:
        """Create from the configuration. Raises ConfigError without a cluster or a namespace."""
        client = KubernetesClient(config.cluster)
        namespace = config.cluster.namespace(config.discovery_namespace, "discovery_namespace")
        named: dict[Role, str] = {"prefill": config.prefill_deployment, "decode": config.decode_deployment}
        deployments = {role: name for role, name in named.items() if name}
        # Unique to this start: a restarted container has the host name and process id of the one before.
        holder = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        duration_s = max(LEAST_LEASE_S, round(3 * config.planner_interval_s))
        return cls(client, namespace, deployments, Lease(client, namespace, config.planner_lease, holder, duration_s))

    async def deployed(self) -> DeployedPools | None:
        """Take or renew the lease, and read the replicas and unschedulable pods of all pools."""
        return await self._attempt("read the pools", self._deployed())

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        """Set the replicas of pools whose last read size differs. Does nothing unless this router is the leader."""
        if self._lease.is_held and not self._has_resigned:
            await self._set(wanted)

    async def wake(self, roles: Collection[Role]) -> None:
        """Set the replicas of pools from 0 to 1. The leader adopts that size."""
        if asleep := {role: 1 for role, num in self._replicas.items() if role in roles and not num}:
            await self._set(asleep)

    async def yield_lead(self) -> None:
        """Release the lease, and do not take it again for two of its durations."""
        await self._release(rest_s=2.0 * self._lease.duration_s)

    async def resign(self) -> None:
        """Release the lease for good, so that another router can take over immediately."""
        if not self._has_resigned:
            self._has_resigned = True
            await self._release()

    async def close(self) -> None:
        """Resign, and close connections."""
        await self.resign()
        await self._client.close()

    async def _release(self, rest_s: float = 0.0) -> None:
        try:
            await self._lease.release(rest_s)
        except KubernetesError as error:
            log.info("planner: cannot release the lease, another router takes over when it expires: %s", error)

    async def _attempt(self, verb: str, call: Awaitable[T]) -> T | None:
        """Return the result of a call; None if it fails. Logs the first of equal failures, and the recovery."""
        try:
            result = await call
        except KubernetesError as error:
            if str(error) != self._problems.get(verb):
                log.warning("planner: cannot %s, retrying at the next plan: %s", verb, error)
            self._problems[verb] = str(error)
            return None
        if self._problems.pop(verb, ""):
            log.info("planner: can %s again", verb)
        return result

    async def _deployed(self) -> DeployedPools:
        is_leader = not self._has_resigned and await self._lease.hold()
        term = self._lease.term if is_leader else None
        led, self._term = term is not None and term == self._term, term
        unschedulable: dict[Role, int] = {}
        for role, name in self._deployments.items():
            found = await self._get(self._path(name), {}, _Scale)
            before, self._replicas[role] = self._replicas.get(role), found.spec.replicas
            if led and before not in (None, found.spec.replicas):
                log.warning(FOREIGN, name, before, found.spec.replicas)
            selector = {"labelSelector": found.status.selector, "fieldSelector": "status.phase=Pending", "limit": "500"}
            pods = await self._get(f"/api/v1/namespaces/{self._namespace}/pods", selector, _PodList)
            unschedulable[role] = sum(pod.is_unschedulable for pod in pods.items)
        return DeployedPools(dict(self._replicas), unschedulable, term)

    async def _set(self, wanted: Mapping[Role, int]) -> None:
        """Set the replicas of the pools that differ. A failure of one pool does not affect the other."""
        for role, name in self._deployments.items():
            before, num = self._replicas.get(role), wanted.get(role)
            if before is not None and num is not None and num != before:
                await self._attempt(f"scale {name}", self._patch(role, name, before, num))

    async def _patch(self, role: Role, name: str, before: int, num: int) -> None:
        await self._client.merge_patch(self._path(name), {"spec": {"replicas": num}})
        self._replicas[role] = num
        log.info(
            "planner: scaled %s from %d to %d replicas", name, before, num, extra={"replicas": num, "before": before}
        )

    def _path(self, name: str) -> str:
        """Return the path of a workload's scale subresource."""
        group = LWS_API if name.startswith(LWS) else "apps/v1"
        kind, _, bare = name.rpartition("/")
        return f"/apis/{group}/namespaces/{self._namespace}/{kind or 'deployments'}/{bare}/scale"

    async def _get(self, path: str, params: Mapping[str, str], kind: type[S]) -> S:
        try:
            return msgspec.json.decode(await self._client.get(path, params), type=kind)
        except msgspec.MsgspecError as error:
            raise KubernetesError(f"{path}: invalid answer: {error}") from error
