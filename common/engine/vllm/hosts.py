"""Other hosts with ranks of a worker's vLLM: their plans and their failures.

    rank host     opens two connections, and passes the second to the follower (`follower.py`)
    worker        FollowerPlan ─> follower, which starts vLLM's ranks
    follower      ─> one sentence, when a rank cannot start or has ended

Ranks connect to the worker's `RankLink` over TCP. Its key is derived on both sides and is never sent.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import threading
from collections.abc import Sequence

import msgspec

from common.config import WorkerConfig
from common.engine.ranks import Channel
from common.engine.vllm.admission import key_of
from common.engine.vllm.connection import interface_to, normalized_address
from common.engine.vllm.link import ConnectorSettings
from common.engine.vllm.rank_hosts import JoinedHost, wait_for_hosts
from common.errors import RankLost

log = logging.getLogger(__name__)
PLAN_S = 10.0
PROBLEM_S = 0.2
"""Maximum time, in seconds, to receive the rest of a problem. The event loop waits for it."""
MAX_PROBLEM_BYTES = 16_384
HOST_IP = "VLLM_HOST_IP"
"""Environment variable with the address at which vLLM's processes listen for other hosts."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LINK_PURPOSE = b"the engine link of one worker"


class FollowerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of another host run. `link_nonce` determines the key that `settings` leaves out.

    `model` is the folder in `arguments`, and `leader` the address at which the ranks meet: the worker's host.
    `kv_space` is vLLM's variable for the size of the KV cache on a CPU, "" if it is not set. The model must have
    `weights_hash`.
    """

    arguments: tuple[str, ...]
    model: str
    settings: ConnectorSettings
    link_nonce: bytes
    weights_hash: str
    on_gpu: bool
    num_ranks: int
    kv_space: str
    log_level: str
    log_json: bool
    node_rank: int = 0
    leader: str = ""


class EngineHosts:
    """Hosts that have joined a worker. Thread-safe."""

    def __init__(self, hosts: Sequence[JoinedHost], curve_key: str) -> None:
        """Takes ownership of the connections unless it raises RankLost: there is no route to the hosts."""
        self._hosts = hosts
        self._lock = threading.Lock()
        self._failure = ""
        self._nonce = secrets.token_bytes(32)
        self.link_key = link_key(curve_key, self._nonce)
        self.address = normalized_address(hosts[0].control.here)
        """Address at which the others reach this host."""
        self._port = _free_port(self.address)
        prepare_network(self.address, hosts[0].name)

    @classmethod
    def wait(cls, config: WorkerConfig) -> EngineHosts | None:
        """Wait for the other hosts of `--rank-hosts`. Raises OSError, ConfigError, or RankLost at the deadline."""
        hosts = wait_for_hosts(config)
        if not hosts:
            return None
        try:
            return cls(hosts, config.curve_key)
        except BaseException:
            for host in hosts:
                host.close()
            raise

    def arguments(self, node_rank: int = 0) -> tuple[str, ...]:
        """Return vLLM's arguments for the host with this number; this host has 0."""
        return (
            *("--distributed-executor-backend", "mp"),
            *("--nnodes", str(len(self._hosts) + 1)),
            *("--node-rank", str(node_rank)),
            *("--master-addr", self.address),
            *("--master-port", str(self._port)),
        )

    def start(self, plan: FollowerPlan) -> None:
        """Let the other hosts start their ranks. Fills in what depends on the host. Raises RankLost."""
        for number, host in enumerate(self._hosts, 1):
            arguments = (*plan.arguments, *self.arguments(number))
            sent = msgspec.structs.replace(
                plan, node_rank=number, leader=self.address, link_nonce=self._nonce, arguments=arguments
            )
            _engine_of(host).send(msgspec.json.encode(sent), PLAN_S)

    def advertised(self, own: str, world_size: int) -> list[str]:
        """Return the host of each rank's KV address. `own` overrides the address of this host."""
        num_each = world_size // (len(self._hosts) + 1)
        return [name for name in (own or self.address, *(host.name for host in self._hosts)) for _ in range(num_each)]

    @property
    def failure(self) -> str:
        """Reason why a host no longer runs its ranks, or ""."""
        with self._lock:
            self._failure = self._failure or next(filter(None, map(_problem_of, self._hosts)), "")
            return self._failure

    @property
    def is_leaving(self) -> bool:
        """Whether a host wants to leave, so that this worker should drain."""
        return any(host.control.has_message() and not host.control.is_cut() for host in self._hosts)

    def close(self) -> None:
        """Disconnect, which ends the ranks of the other hosts."""
        for host in self._hosts:
            host.close()


def link_key(curve_key: str, nonce: bytes) -> bytes:
    """Return the key of the link between a worker and its ranks. Raises ConfigError for an invalid file."""
    return hmac.digest(key_of(curve_key), LINK_PURPOSE + nonce, "sha256")


def prepare_network(own: str, peer: str) -> None:
    """Set the variables with which vLLM's processes find their own address and interface, unless they are set.

    Raises RankLost if there is no route to `peer`.
    """
    os.environ.setdefault(HOST_IP, own)
    if missing := [name for name in INTERFACES if name not in os.environ]:
        os.environ.update(dict.fromkeys(missing, interface_to(peer)))


def _engine_of(host: JoinedHost) -> Channel:
    assert host.engine is not None  # `wait_for_hosts` returns complete hosts
    return host.engine


def _problem_of(host: JoinedHost) -> str:
    """Return what a host reports, or that it is gone; "" while it runs its ranks."""
    engine = _engine_of(host)
    if engine.has_message():
        try:
            return f"{engine.peer}: {engine.receive(PROBLEM_S, MAX_PROBLEM_BYTES).decode(errors='replace')}"
        except RankLost as error:
            return str(error)
    return f"{host.control.peer} is gone" if host.control.is_cut() else ""


def _free_port(host: str) -> int:
    """Return a port that is free now, at which vLLM's ranks will meet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
