"""A service of a few machines: which process runs where, on which ports, by which command. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final, Literal

from common.config import DecodeWorkerConfig, PrefillWorkerConfig, RouterConfig
from common.config.field import Config, fields_of
from common.errors import ConfigError
from common.wire.listening import ALL, ALL_IPV4, in_url

Accelerator = Literal["cpu", "cuda", "rocm"]
ACCELERATORS: Final[tuple[Accelerator, ...]] = ("cpu", "cuda", "rocm")
Kind = Literal["router", "prefill-worker", "decode-worker"]

PLACE: Final = re.compile(r"([A-Za-z0-9_.:-]+?)(?:\*([1-9][0-9]?))?")
"""A machine, or a machine and how many workers it has: 10.0.0.7*2."""
PORTS_OF_A_WORKER: Final = 10
"""Workers of one machine are so many ports apart."""
CONTROL, KV, HTTP, LEND = range(1, 5)
"""A worker's ports, counted from its first."""
MARGIN_S: Final = 15
"""What a process gets beyond its drain before it is killed."""


@dataclass(frozen=True)
class Unit:
    """One process on one machine. `flags` are those that no other process has; the rest is in the common file.

    `place` counts the workers of its machine: on GPUs each has the device of that number.
    """

    kind: Kind
    host: str
    index: int
    flags: tuple[str, ...]
    health_url: str
    stop_timeout_s: int
    place: int = 0

    @property
    def name(self) -> str:
        return self.kind if self.kind == "router" else f"{self.kind}-{self.index}"

    @property
    def address(self) -> str:
        """Where the router finds it: of a worker its control socket."""
        port = self.flags[self.flags.index("--port") + 1]
        return f"tcp://{in_url(self.host)}:{port}"


@dataclass(frozen=True)
class Lab:
    """What `diptych units` is asked for. Raises ConfigError for what cannot run."""

    model: str
    router: str
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    accelerator: Accelerator = "cpu"
    router_port: int = 8000
    worker_port: int = 7000

    def __post_init__(self) -> None:
        if not self.decode:
            raise ConfigError("decode", "", "HOST or HOST*COUNT, at least once: decode workers answer requests")
        for field, places in (("router", (self.router,)), ("prefill", self.prefill), ("decode", self.decode)):
            for place in places:
                if not PLACE.fullmatch(place) or (field == "router" and "*" in place):
                    raise ConfigError(field, place, "a host name or address, of workers also HOST*COUNT, up to 99")
        if not 1 <= self.router_port <= 65535:
            raise ConfigError("router_port", self.router_port, "from 1 to 65535")
        last = self.worker_port + PORTS_OF_A_WORKER * max(Counter(_machines((*self.prefill, *self.decode))).values())
        if self.worker_port < 1 or last > 65535:
            raise ConfigError("worker_port", self.worker_port, f"from 1, and {last} must be a port")
        if self.router in _machines((*self.prefill, *self.decode)) and self.worker_port < self.router_port <= last:
            raise ConfigError("router_port", self.router_port, f"none of {self.worker_port} to {last}: workers' ports")

    @property
    def hosts(self) -> tuple[str, ...]:
        """Every machine once, the router's first."""
        return tuple(dict.fromkeys((self.router, *_machines((*self.prefill, *self.decode)))))

    def units(self) -> tuple[Unit, ...]:
        """Every process: the router, then workers."""
        return (self._router(), *self._workers())

    def _router(self) -> Unit:
        flags = (*_listening(self.router), "--port", str(self.router_port))
        url = f"http://{in_url(self.router)}:{self.router_port}/health"
        return Unit("router", self.router, 0, flags, url, _seconds(RouterConfig) + MARGIN_S)

    def _workers(self) -> Iterator[Unit]:
        taken: Counter[str] = Counter()
        kinds: tuple[tuple[Kind, type[Config], tuple[str, ...]], ...] = (
            ("prefill-worker", PrefillWorkerConfig, self.prefill),
            ("decode-worker", DecodeWorkerConfig, self.decode),
        )
        for kind, config, places in kinds:
            of_kind: Counter[str] = Counter()
            for host in _machines(places):
                first = self.worker_port + PORTS_OF_A_WORKER * taken[host]
                ports = {"--port": CONTROL, "--http-port": HTTP, "--lend-port": LEND}
                if kind == "decode-worker":
                    ports["--kv-port"] = KV
                flags = [*_listening(host), "--advertise-host", host]
                flags += [part for flag, port in ports.items() for part in (flag, str(first + port))]
                flags += ["--worker-id", f"{kind.partition('-')[0]}-{host}-{of_kind[host]}"]
                url = f"http://{in_url(host)}:{first + HTTP}/health"
                end_s = _seconds(config) + MARGIN_S
                yield Unit(kind, host, of_kind[host], tuple(flags), url, end_s, taken[host])
                taken[host] += 1
                of_kind[host] += 1

    def settings(self) -> str:
        """The configuration file that all processes read, in TOML."""
        units = self.units()
        prefill, decode = (
            [unit.address for unit in units if unit.kind == kind] for kind in ("prefill-worker", "decode-worker")
        )
        sections: dict[str, dict[str, str | list[str]]] = {
            "router": {"model": self.model, "prefill": prefill, "decode": decode},
            "prefill_worker": {"model": self.model},
            "decode_worker": {"model": self.model},
        }
        return "\n".join(_table(name, values) for name, values in sections.items())


def device_flags(unit: Unit, accelerator: Accelerator, *, sees_all: bool) -> tuple[str, ...]:
    """A worker's flags for its device. `sees_all`: all devices of the machine, and not one alone."""
    if unit.kind == "router":
        return ()
    if accelerator == "cpu":
        return ("--device", "cpu")
    # ROCm's torch answers to CUDA's name.
    return ("--device", f"cuda:{unit.place if sees_all else 0}")


def _machines(places: Sequence[str]) -> list[str]:
    """The machine of each worker."""
    found = [match for place in places if (match := PLACE.fullmatch(place))]
    return [match[1] for match in found for _ in range(int(match[2] or 1))]


def _listening(host: str) -> tuple[str, ...]:
    """An address is bound itself. A name may stand for another one on its own machine: all are bound."""
    try:
        ip_address(host)
    except ValueError:
        return ("--host", ALL_IPV4)
    return ("--host", host if host != ALL_IPV4 else ALL)


def _seconds(config: type[Config]) -> int:
    """The drain of a process by default."""
    return next(int(field.default) for field in fields_of(config) if field.name == "drain_timeout_s")


def _table(name: str, values: dict[str, str | list[str]]) -> str:
    return "".join((f"[{name}]\n", *(f"{key} = {_toml(value)}\n" for key, value in values.items())))


def _toml(value: str | list[str]) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
