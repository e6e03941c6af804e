"""Settings of the planner, which sizes the pools."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.field import DURATION, Config, setting
from common.errors import ConfigError

MOST_WORKERS = 1024
"""Maximum size of a pool that a router supports."""
DEFAULT_MOST = 64
"""Default maximum size of a pool."""

_NAME = {
    "pattern": r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?",
    "expects": "a valid Kubernetes name",
    "metavar": "NAME",
}
_WORKLOAD = _NAME | {"pattern": rf"((leaderworkersets/)?{_NAME['pattern'][1:-2]})?"}


@dataclass(frozen=True)
class PlannerSettings(Config):
    """Whether a router plans the sizes of the pools, and the limits of the plan."""

    planner: str = setting(
        "off",
        "planning of the number of workers per pool from load, measured step times and goals",
        group="Autoscaling",
        details="`advice` logs the plan and exports it as diptych_pool_wanted_workers. `kubernetes` also sets the "
        "replicas of --prefill-deployment and --decode-deployment, or of those in --models-file.",
        choices=("off", "advice", "kubernetes"),
    )
    slo_quantile: float = setting(
        0.95,
        "fraction of requests that should meet --slo-ttft-ms and --slo-tpot-ms",
        group="Goals",
        ge=0.5,
        le=0.999,
    )
    min_prefill: int = setting(
        0,
        "minimum number of prefill workers; 0 stops all of them while no requests arrive",
        group="Autoscaling",
        ge=0,
        le=MOST_WORKERS,
    )
    max_prefill: int = setting(
        0,
        "maximum number of prefill workers",
        group="Autoscaling",
        default_note=f"{DEFAULT_MOST}, or half of the cores under diptych serve",
        ge=0,
        le=MOST_WORKERS,
    )
    min_decode: int = setting(
        1,
        "minimum number of decode workers; 0 stops all of them while no requests arrive",
        group="Autoscaling",
        details="With --role-change, one always remains.",
        ge=0,
        le=MOST_WORKERS,
    )
    max_decode: int = setting(
        0,
        "maximum number of decode workers",
        group="Autoscaling",
        default_note=f"{DEFAULT_MOST}, or half of the cores under diptych serve",
        ge=0,
        le=MOST_WORKERS,
    )
    price_prefill: float = setting(
        1.0, "cost of a prefill worker, in units of --max-cost", group="Autoscaling", ge=0.001, le=1e9
    )
    price_decode: float = setting(
        1.0, "cost of a decode worker, in units of --max-cost", group="Autoscaling", ge=0.001, le=1e9
    )
    max_cost: float = setting(
        0.0,
        "maximum total cost of the workers of all models",
        group="Autoscaling",
        default_note="no limit",
        ge=0,
        le=1e12,
    )
    scale_to_zero_s: float = setting(
        300.0,
        "seconds without requests after which a pool with a minimum of 0 is stopped",
        group="Autoscaling",
        details="At least 90 s and the start time of a worker.",
        **DURATION,
    )
    prefill_deployment: str = setting(
        "",
        "Deployment of the prefill workers, or leaderworkersets/NAME, for --planner kubernetes",
        group="Autoscaling",
        details="It must be in the namespace of discovery.",
        default_note="none",
        **_WORKLOAD,
    )
    decode_deployment: str = setting(
        "",
        "Deployment of the decode workers, or leaderworkersets/NAME, for --planner kubernetes",
        group="Autoscaling",
        **_WORKLOAD,
    )
    planner_lease: str = setting(
        "diptych-planner",
        "Lease of the router that scales the Deployments, for --planner kubernetes",
        group="Autoscaling",
        details="Each of several models has its own: this name, a hyphen and its position in --models-file, "
        "unless the file names one.",
        **_NAME,
    )
    planner_interval_s: float = setting(5.0, "seconds between two plans", group="Autoscaling", ge=0.1, le=300)

    def most(self, role: str) -> int:
        """Return the maximum number of workers of a role, `prefill` or `decode`."""
        return int(getattr(self, f"max_{role}")) or max(DEFAULT_MOST, int(getattr(self, f"min_{role}")))

    def check(self) -> None:
        super().check()
        self._check_kubernetes()
        for role in ("prefill", "decode"):
            least, most = getattr(self, f"min_{role}"), getattr(self, f"max_{role}")
            if 0 < most < least:
                raise ConfigError(f"max_{role}", most, f"0 or at least {least}, the value of --min-{role}")
        cheapest = self.min_prefill * self.price_prefill + max(1, self.min_decode) * self.price_decode
        if 0.0 < self.max_cost < cheapest:
            raise ConfigError(
                "max_cost", self.max_cost, f"0 or at least {cheapest:g}, the cost of the minimum number of workers"
            )

    def _check_kubernetes(self) -> None:
        scales = self.planner == "kubernetes"
        for role in ("prefill", "decode"):
            name = getattr(self, f"{role}_deployment")
            if name and not scales:
                raise ConfigError(f"{role}_deployment", name, "empty without --planner kubernetes")
            if name and not getattr(self, f"max_{role}"):
                raise ConfigError(f"max_{role}", 0, "at least 1 with --planner kubernetes")
        if scales and not self.planner_lease:
            raise ConfigError("planner_lease", "", "the name of a Lease with --planner kubernetes")
