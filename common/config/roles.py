"""Settings of a router that changes the roles of running workers."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.field import Config, setting


@dataclass(frozen=True)
class RoleSettings(Config):
    """Whether workers change between prefill and decode; `PlannerSettings` has the least of a pool."""

    role_change: bool = setting(
        False,
        "change running workers between prefill and decode where one pool is behind and the other is not; workers need "
        "--role-change, too",
        group="Scaling",
    )
