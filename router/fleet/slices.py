"""EndpointSlices (discovery.k8s.io/v1): the relevant fields, and the workers that they list. Pure."""

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
    """Metadata of an object or a list. `continued` is the token of a list's next page."""

    name: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    continued: str | None = msgspec.field(name="continue", default=None)


class Conditions(msgspec.Struct):
    """Conditions of an endpoint. By default it is ready, serves if it is ready, and is not terminating."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Target(msgspec.Struct):
    """The pod of an endpoint."""

    uid: str = ""


class SliceEndpoint(msgspec.Struct, rename="camel"):
    """An endpoint. All `addresses` belong to one pod; the first is used."""

    addresses: list[str] | None = None
    conditions: Conditions | None = None
    target_ref: Target | None = None


class Port(msgspec.Struct):
    """A named port of all endpoints of a slice."""

    name: str | None = None
    port: int | None = None


class EndpointSlice(msgspec.Struct, rename="camel"):
    """A part of a Service's endpoints, with addresses of one family."""

    metadata: Metadata
    address_type: str = "IPv4"
    endpoints: list[SliceEndpoint] | None = None
    ports: list[Port] | None = None

    @property
    def service(self) -> str:
        return (self.metadata.labels or {}).get(SERVICE_LABEL, "")

    @property
    def control_port(self) -> int:
        """The control port; 0 if the slice has none."""
        return next((port.port or 0 for port in self.ports or () if port.name == PORT_NAME), 0)


class SliceList(msgspec.Struct):
    """A page of a consistent list of slices."""

    metadata: Metadata
    items: list[EndpointSlice]


class WatchEvent(msgspec.Struct):
    """ADDED, MODIFIED or DELETED with a slice, BOOKMARK, or ERROR with a Status."""

    type: str
    object: msgspec.Raw


class ErrorStatus(msgspec.Struct):
    """The reason why a watch ended."""

    code: int = 0
    message: str = ""


def parse(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Parse `data` as a `kind`. Raises KubernetesError for unexpected data."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise KubernetesError(f"unexpected answer of the API server, not a {kind.__name__}: {error}") from error


class SliceStore:
    """Existing slices by name. `services` maps Service names to the role of their pods."""

    def __init__(self, services: Mapping[str, Role]) -> None:
        self._services = services
        self._slices: dict[str, EndpointSlice] = {}

    def put(self, found: EndpointSlice) -> None:
        """Add or replace a slice."""
        if found.service in self._services:
            self._slices[found.metadata.name] = found
        else:
            self.remove(found)

    def remove(self, gone: EndpointSlice) -> None:
        """Remove a deleted slice."""
        self._slices.pop(gone.metadata.name, None)

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Return every worker once.

        While Kubernetes moves an endpoint between slices, both list it; it serves if either reports so. IPv4 is used
        for pods with addresses of both families.
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
        """Return the Services with endpoints but without a port named "control", which is an error in a manifest."""
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
    """Merge two entries of one address. If Services of both roles list it, the first role is used."""
    return Endpoint(
        one.role, one.address, one.serving or other.serving, terminating=one.terminating and other.terminating
    )


def _host(addresses: Iterable[Any]) -> str:
    """Return the first address as the host of a URL; "" if it is invalid."""
    first = next(iter(addresses), "")
    try:
        ip = ipaddress.ip_address(first)
    except ValueError:
        return first if _HOST_NAME.fullmatch(first) else ""
    return f"[{ip}]" if ip.version == 6 else str(ip)
