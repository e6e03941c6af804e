"""EndpointSlices (discovery.k8s.io/v1): the fields that matter here, and the workers that they list. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from common.cluster import KubernetesError
from common.wire import Role
from router.fleet.discovery import Endpoint

SERVICE_LABEL = "kubernetes.io/service-name"
PORT_NAME = "control"
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")

T = TypeVar("T")


class Metadata(msgspec.Struct, rename="camel"):
    """The metadata of an object or a list. `continued` asks for a list's next page."""

    name: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    continued: str | None = msgspec.field(name="continue", default=None)


class Conditions(msgspec.Struct):
    """Without values an endpoint is ready, serves if it is ready, and is not terminating."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Target(msgspec.Struct):
    """The pod behind an endpoint."""

    uid: str = ""


class SliceEndpoint(msgspec.Struct, rename="camel"):
    """All `addresses` belong to one pod; clients use the first."""

    addresses: list[str] | None = None
    conditions: Conditions | None = None
    target_ref: Target | None = None


class Port(msgspec.Struct):
    """A named port that all endpoints of a slice have."""

    name: str | None = None
    port: int | None = None


class EndpointSlice(msgspec.Struct, rename="camel"):
    """A part of a Service's endpoints, of one family of addresses."""

    metadata: Metadata
    address_type: str = "IPv4"
    endpoints: list[SliceEndpoint] | None = None
    ports: list[Port] | None = None

    @property
    def service(self) -> str:
        return (self.metadata.labels or {}).get(SERVICE_LABEL, "")

    @property
    def control_port(self) -> int:
        """0 for a slice without one."""
        return next((port.port or 0 for port in self.ports or () if port.name == PORT_NAME), 0)


class SliceList(msgspec.Struct):
    """A page of slices, all as of one moment."""

    metadata: Metadata
    items: list[EndpointSlice]


class WatchEvent(msgspec.Struct):
    """ADDED, MODIFIED or DELETED with a slice, BOOKMARK, or ERROR with a Status."""

    type: str
    object: msgspec.Raw


class ErrorStatus(msgspec.Struct):
    """Why a watch cannot go on."""

    code: int = 0
    message: str = ""


def parse(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """`data` as a `kind`. Raises KubernetesError if the API server sent anything else."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise KubernetesError(f"the API server sent what is no {kind.__name__}: {error}") from error


class SliceStore:
    """The slices that exist, by name. `services` maps the name of a Service to the role of its pods."""

    def __init__(self, services: Mapping[str, Role]) -> None:
        self._services = services
        self._slices: dict[str, EndpointSlice] = {}

    def put(self, found: EndpointSlice) -> None:
        """A slice is new, or has changed."""
        if found.service in self._services:
            self._slices[found.metadata.name] = found
        else:
            self.remove(found)

    def remove(self, gone: EndpointSlice) -> None:
        """A slice was deleted."""
        self._slices.pop(gone.metadata.name, None)

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Every worker once.

        While Kubernetes moves an endpoint between slices, both list it: it serves if either says so. A pod with
        addresses of both families is reached by IPv4.
        """
        with_ipv4 = {
            entry.target_ref.uid
            for found in self._slices.values()
            if found.address_type == "IPv4"
            for entry in found.endpoints or ()
            if entry.target_ref is not None
        }
        merged: dict[str, Endpoint] = {}
        for name in sorted(self._slices):
            found = self._slices[name]
            for entry in found.endpoints or ():
                target = entry.target_ref.uid if entry.target_ref is not None else ""
                if found.address_type == "IPv6" and target and target in with_ipv4:
                    continue
                endpoint = self._endpoint(found, entry)
                if endpoint is not None:
                    known = merged.get(endpoint.address)
                    merged[endpoint.address] = endpoint if known is None else _merge(known, endpoint)
        return tuple(sorted(merged.values()))

    def portless(self) -> list[str]:
        """Services with endpoints but without a port named "control", by a mistake in their manifest."""
        return sorted({found.service for found in self._slices.values() if found.endpoints and not found.control_port})

    def _endpoint(self, found: EndpointSlice, entry: SliceEndpoint) -> Endpoint | None:
        port, host = found.control_port, _host(entry.addresses or ())
        if not host or not 0 < port < 65536:
            return None
        says = entry.conditions or Conditions()
        ready = says.ready is not False
        serving = ready if says.serving is None else says.serving
        return Endpoint(self._services[found.service], f"tcp://{host}:{port}", serving, bool(says.terminating))


def _merge(one: Endpoint, other: Endpoint) -> Endpoint:
    """One address that two slices list; behind Services of both roles it has the role of the first."""
    return Endpoint(
        one.role, one.address, one.serving or other.serving, terminating=one.terminating and other.terminating
    )


def _host(addresses: Iterable[Any]) -> str:
    """The first address as the host of a URL; "" if it cannot be one."""
    first = next(iter(addresses), "")
    try:
        ip = ipaddress.ip_address(first)
    except ValueError:
        return first if _HOST_NAME.fullmatch(first) else ""
    return f"[{ip}]" if ip.version == 6 else str(ip)
