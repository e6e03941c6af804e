"""Leader election among several processes with a Lease of the Kubernetes API.

    no process holds it, or its holder did not renew it in time ──> try to take it ──> renew it at each `hold`

Each process measures with its own clock how long it has seen the same renewal, so clocks do not have to agree (as in
Kubernetes' own client, client-go/tools/leaderelection). An update contains the version it is based on: of two
concurrent updates the API server rejects one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus

import msgspec

from common.cluster.api import KubernetesClient, KubernetesError

log = logging.getLogger(__name__)


class _Metadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""


class _Spec(msgspec.Struct, rename="camel"):
    holder_identity: str | None = None
    renew_time: str | None = None
    lease_duration_seconds: int | None = None
    lease_transitions: int | None = None


class _Lease(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    spec: _Spec = msgspec.field(default_factory=_Spec)


class Lease:
    """One process's view of the Lease `name`. `hold` must be called more often than every `duration_s` seconds.

    `term` counts the Lease's changes of holder. It is the term that this process held last, None before the first.
    """

    def __init__(
        self,
        client: KubernetesClient,
        namespace: str,
        name: str,
        holder: str,
        duration_s: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._name, self._holder = client, name, holder
        self._folder = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self.duration_s, self._clock = duration_s, clock
        self._seen: tuple[str | None, str | None] | None = None
        self._seen_at = 0.0
        self._resting_until = -math.inf
        self.is_held = False
        self.term: int | None = None

    async def hold(self) -> bool:
        """Take or renew the Lease. Returns whether acquired leadership. Raises KubernetesError."""
        if self._clock() < self._resting_until:
            return False
        held, self.is_held = self.is_held, False  # a failed renewal ends it
        lease = await self._read()
        if lease is None:
            self.is_held = await self._write(None, num_transitions=0)
        else:
            spec = lease.spec
            if (spec.holder_identity, spec.renew_time) != self._seen:
                self._seen, self._seen_at = (spec.holder_identity, spec.renew_time), self._clock()
            own = spec.holder_identity == self._holder
            if own or not spec.holder_identity or self._clock() - self._seen_at > self._duration_of(spec):
                num = (spec.lease_transitions or 0) + (not own)
                self.is_held = await self._write(lease.metadata.resource_version, num_transitions=num)
        if self.is_held is not held:
            log.info("lease %s: %s", self._name, "acquired leadership" if self.is_held else "lost leadership")
        return self.is_held

    async def release(self, rest_s: float = 0.0) -> None:
        """Release the Lease, so that another process can take it immediately. Raises KubernetesError.

        This process does not try to take it again for `rest_s` seconds.
        """
        self._resting_until = self._clock() + rest_s
        held, self.is_held = self.is_held, False
        if held and (lease := await self._read()) is not None and lease.spec.holder_identity == self._holder:
            body = {"metadata": {"resourceVersion": lease.metadata.resource_version}, "spec": {"holderIdentity": ""}}
            await self._client.merge_patch(f"{self._folder}/{self._name}", body)

    def _duration_of(self, spec: _Spec) -> int:
        return spec.lease_duration_seconds or self.duration_s

    async def _read(self) -> _Lease | None:
        try:
            return msgspec.json.decode(await self._client.get(f"{self._folder}/{self._name}", {}), type=_Lease)
        except KubernetesError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise
        except msgspec.MsgspecError as error:
            raise KubernetesError(f"the lease {self._name} is invalid: {error}") from error

    async def _write(self, version: str | None, num_transitions: int) -> bool:
        """Create the Lease, or update this version of it. Returns False if another process was faster."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {
            "holderIdentity": self._holder,
            "leaseDurationSeconds": self.duration_s,
            "renewTime": now,
            "leaseTransitions": num_transitions,
        }
        try:
            if version is None:
                body = {
                    "apiVersion": "coordination.k8s.io/v1",
                    "kind": "Lease",
                    "metadata": {"name": self._name},
                    "spec": spec,
                }
                await self._client.create(self._folder, body)
            else:
                patch = {"metadata": {"resourceVersion": version}, "spec": spec}
                await self._client.merge_patch(f"{self._folder}/{self._name}", patch)
        except KubernetesError as error:
            if error.status == HTTPStatus.CONFLICT:
                return False
            raise
        self.term = num_transitions
        return True
