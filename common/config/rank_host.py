"""Settings of a host that runs some ranks of a worker on another host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from common.config.common import ProcessConfig
from common.config.field import FILE, TIMEOUT, setting
from common.errors import ConfigError

_LEADER = r"((\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5})?"


@dataclass(frozen=True)
class RankHostConfig(ProcessConfig):
    """Address and key of the worker, which sends all other settings."""

    section: ClassVar[str] = "rank_host"
    env_prefix: ClassVar[str] = "RANK_HOST"
    about: ClassVar[str] = (
        "Run vLLM's ranks of a worker with --rank-hosts on an additional host. "
        "After the worker exits, this process waits for the next one at the same address."
    )
    examples: ClassVar[tuple[tuple[str, str], ...]] = (
        ("diptych rank-host --leader 10.0.0.7:7005 --curve-key key.toml", ""),
    )

    leader: str = setting(
        "",
        "address of the worker's --rank-port",
        group="Workers",
        common=True,
        pattern=_LEADER,
        expects="HOST:PORT, such as 10.0.0.7:7005",
        metavar="HOST:PORT",
    )
    curve_key: str = setting(
        "",
        "file with the CURVE key pair of the worker",
        group="Security",
        details="The worker and this host authenticate each other with it.",
        default_note="no authentication",
        common=True,
        **FILE,
    )
    leader_timeout_s: float = setting(
        900.0,
        "seconds without a worker at --leader after which this process exits with status 1",
        group="Timeouts",
        common=True,
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
