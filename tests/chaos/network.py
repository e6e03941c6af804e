"""A network of namespaces on this machine, one a process, with cables that can be cut or made slow.

host ── bridge ──┬── router          The host has the bridge's address: clients and probes run there.
                 ├── prefill-0
                 └── decode-0 ...
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.stack import Place

BRIDGE_HOST = 1
IP_TIMEOUT_S = 10.0
NOBODY = "02:00:00:00:00:01"
"""A hardware address that no interface has."""


class NetworkError(Exception):
    """The kernel or our rights do not allow it."""


def ip(*arguments: str) -> None:
    """Run iproute2's `ip`. Raises NetworkError."""
    run("ip", *arguments)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=IP_TIMEOUT_S)
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip()}")


class Network:
    """Use as a context: nothing of it is left behind. `hosts` are the names of the processes to come."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._tag = f"d{os.getpid() % 100000}"
        self._subnet = f"10.231.{os.getpid() % 200 + 1}"
        self._hosts = {name: index for index, name in enumerate(hosts, start=BRIDGE_HOST + 1)}
        self.places = {
            name: Place(("ip", "netns", "exec", self._namespace(name)), self.address(name)) for name in hosts
        }

    def __enter__(self) -> Network:
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def address(self, name: str) -> str:
        return f"{self._subnet}.{self._hosts[name]}"

    @contextmanager
    def cut(self, name: str) -> Iterator[None]:
        """A process's cable is out for as long as the context lasts."""
        ip("link", "set", self._cable(name), "down")
        try:
            yield
        finally:
            ip("link", "set", self._cable(name), "up")

    @contextmanager
    def cut_between(self, one: str, other: str) -> Iterator[None]:
        """Two processes cannot reach each other; what they send is lost without a word."""
        pairs = ((one, other), (other, one))
        for here, there in pairs:
            self._neighbour(here, there, "replace", "lladdr", NOBODY, "nud", "permanent")
        try:
            yield
        finally:
            for here, there in pairs:
                self._neighbour(here, there, "del")

    @contextmanager
    def slow(self, name: str, *, rate: str, queue_ms: float) -> Iterator[None]:
        """A process's cable carries `rate` only, both ways; what would wait for longer than `queue_ms` is lost."""
        bucket = ("root", "tbf", "rate", rate, "burst", "16kb", "latency", f"{queue_ms:g}ms")
        ends = (("-n", self._namespace(name), "qdisc", "{}", "dev", "eth0"), ("qdisc", "{}", "dev", self._cable(name)))
        for end in ends:
            run("tc", *(part.format("add") for part in end), *bucket)
        try:
            yield
        finally:
            for end in ends:
                run("tc", *(part.format("del") for part in end), "root")

    # ------------------------------------------------------------ inside

    def _namespace(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _cable(self, name: str) -> str:
        return f"{self._tag}v{self._hosts[name]}"

    def _bridge(self) -> str:
        return f"{self._tag}br"

    def _neighbour(self, here: str, there: str, *what: str) -> None:
        action, *rest = what
        ip("-n", self._namespace(here), "neigh", action, self.address(there), *rest, "dev", "eth0")

    def _build(self) -> None:
        ip("link", "add", self._bridge(), "type", "bridge")
        ip("addr", "add", f"{self._subnet}.{BRIDGE_HOST}/24", "dev", self._bridge())
        ip("link", "set", self._bridge(), "up")
        for name in self._hosts:
            namespace, cable = self._namespace(name), self._cable(name)
            ip("netns", "add", namespace)
            ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            ip("link", "set", cable, "master", self._bridge(), "up")
            ip("-n", namespace, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")
            ip("-n", namespace, "link", "set", "lo", "up")

    def _remove(self) -> None:
        """Parts that were not built are not there to be removed. Cables would go with their namespaces, but later."""
        cables = [("link", "del", self._cable(name)) for name in self._hosts]
        namespaces = [("netns", "del", self._namespace(name)) for name in self._hosts]
        for one in (*cables, *namespaces, ("link", "del", self._bridge())):
            subprocess.run(("ip", *one), capture_output=True, timeout=IP_TIMEOUT_S)


def why_not() -> str:
    """Why this machine cannot have such a network; "" when it can."""
    if not (shutil.which("ip") and shutil.which("tc")):
        return "iproute2 is not installed"
    try:
        with (
            Network(("a", "b")) as network,
            network.cut_between("a", "b"),
            network.slow("a", rate="1mbit", queue_ms=10),
        ):
            pass
    except (NetworkError, OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ""
