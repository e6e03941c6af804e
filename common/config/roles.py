"""Settings of a router that changes the roles of running workers."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.field import Config, setting


@dataclass(frozen=True)
class RoleSettings(Config):
    """Whether workers change between prefill and decode, and how often; `PlannerSettings` has the least of a pool."""

    role_change: bool = setting(
        False,
        "change running workers between prefill and decode where one pool is behind and the other is not; workers need "
        "--role-change, too",
        group="Scaling",
    )
    role_change_after_s: float = setting(
        3.0,
        "seconds that a pool must be behind without a pause before a worker changes its role",
        group="Scaling",
        ge=0.05,
        le=3600,
    )
    role_change_interval_s: float = setting(
        15.0, "least seconds between two changes of roles", group="Scaling", ge=0.05, le=86400
    )
