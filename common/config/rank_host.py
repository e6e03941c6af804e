"""Settings of a host that has ranks of a worker on another host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from common.config.common import ProcessConfig
from common.config.field import FILE, TIMEOUT, setting
from common.errors import ConfigError

_LEADER = r"((\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5})?"


@dataclass(frozen=True)
class RankHostConfig(ProcessConfig):
    """What it needs to find rank 0, which says the rest."""

    section: ClassVar[str] = "rank_host"
    env_prefix: ClassVar[str] = "RANK_HOST"
    about: ClassVar[str] = (
        "Runs ranks of a worker that is spread over several hosts (--rank-hosts): on each host but the worker's own. "
        "The worker says what they load and compute, on the same devices and from the same paths as on its own host. "
        "They end with the worker; then this process waits for the next one at the same address."
    )

    leader: str = setting(
        "",
        "the worker's --rank-port, at an address of its host",
        group="Sockets",
        pattern=_LEADER,
        expects="HOST:PORT, such as 10.0.0.7:7005",
        metavar="HOST:PORT",
    )
    curve_key: str = setting(
        "",
        "the key pair of the worker's --curve-key, by which both prove to each other that they belong together",
        group="Sockets",
        **FILE,
    )
    leader_timeout_s: float = setting(
        900.0,
        "seconds without a worker at --leader after which this process ends with status 1",
        group="Deadlines",
        **TIMEOUT,
    )

    def check(self) -> None:
        super().check()
        if self.leader and not 0 < int(self.leader.rpartition(":")[2]) < 65536:
            raise ConfigError("leader", self.leader, "a port from 1 to 65535")

    def check_start(self) -> None:
        super().check_start()
        if not self.leader:
            raise ConfigError("leader", "", "HOST:PORT of a worker with --rank-hosts, such as 10.0.0.7:7005")
