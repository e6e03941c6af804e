"""Settings of the planner: what the pools are sized for, and within which bounds."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.field import DURATION, Config, setting
from common.errors import ConfigError

MOST_WORKERS = 1024
"""Of a pool: as many as a router connects to."""
DEFAULT_MOST = 64
"""Of a pool, where no other bound is set."""


_NAME = {
    "pattern": r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?",
    "expects": "a name as Kubernetes takes it",
    "metavar": "NAME",
}
_WORKLOAD = _NAME | {"pattern": rf"((leaderworkersets/)?{_NAME['pattern'][1:-2]})?"}


@dataclass(frozen=True)
class PlannerSettings(Config):
    """Whether a router plans the sizes of the pools, and what it may plan."""

    planner: str = setting(
        "off",
        "plan how many workers each pool should have from the offered load, the workers' own models of their steps and "
        "the goals; off: no plan; advice: log the plan when it changes, and export it for autoscalers as "
        "diptych_pool_wanted_workers; kubernetes: also set the replicas of --prefill-deployment and "
        "--decode-deployment, or of those that --models-file names",
        group="Scaling",
        choices=("off", "advice", "kubernetes"),
    )
    slo_quantile: float = setting(
        0.95,
        "share of requests that the pools are sized for to meet --slo-ttft-ms and --slo-tpot-ms",
        group="Scaling",
        ge=0.5,
        le=0.999,
    )
    min_prefill: int = setting(
        0,
        "fewest prefill workers that are planned, and that --role-change leaves; 0: none while no request comes",
        group="Scaling",
        ge=0,
        le=MOST_WORKERS,
    )
    max_prefill: int = setting(
        0,
        f"most prefill workers that are planned; 0: {DEFAULT_MOST}, under `diptych serve` half of the cores",
        group="Scaling",
        ge=0,
        le=MOST_WORKERS,
    )
    min_decode: int = setting(
        1,
        "fewest decode workers that are planned, and that --role-change leaves, which always leaves one; 0: none while "
        "no request comes",
        group="Scaling",
        ge=0,
        le=MOST_WORKERS,
    )
    max_decode: int = setting(
        0,
        f"most decode workers that are planned; 0: {DEFAULT_MOST}, under `diptych serve` half of the cores",
        group="Scaling",
        ge=0,
        le=MOST_WORKERS,
    )
    price_prefill: float = setting(
        1.0, "what a prefill worker costs, in units of --max-cost", group="Scaling", ge=0.001, le=1e9
    )
    price_decode: float = setting(
        1.0, "what a decode worker costs, in units of --max-cost", group="Scaling", ge=0.001, le=1e9
    )
    max_cost: float = setting(
        0.0, "what all planned workers, of all models, may cost together; 0: no limit", group="Scaling", ge=0, le=1e12
    )
    scale_to_zero_s: float = setting(
        300.0,
        "seconds without a need for it after which a pool whose minimum is 0 is planned with no worker; at least 90, "
        "and the time that a worker takes to start",
        group="Scaling",
        **DURATION,
    )
    prefill_deployment: str = setting(
        "",
        "with --planner kubernetes: the Deployment of the prefill workers, or leaderworkersets/NAME, in the namespace "
        "of discovery; empty: there is none",
        group="Scaling",
        **_WORKLOAD,
    )
    decode_deployment: str = setting(
        "",
        "with --planner kubernetes: the Deployment of the decode workers, or leaderworkersets/NAME",
        group="Scaling",
        **_WORKLOAD,
    )
    planner_lease: str = setting(
        "diptych-planner",
        "with --planner kubernetes: the Lease that is held by the one router that scales the Deployments; of several "
        "models each has one, with a hyphen and its place in --models-file behind this name, unless it names its own",
        group="Scaling",
        **_NAME,
    )
    planner_interval_s: float = setting(
        5.0, "seconds between two looks of the planner", group="Scaling", ge=0.1, le=300
    )

    def most(self, role: str) -> int:
        """The most workers of a role, `prefill` or `decode`."""
        return int(getattr(self, f"max_{role}")) or max(DEFAULT_MOST, int(getattr(self, f"min_{role}")))

    def check(self) -> None:
        super().check()
        self._check_kubernetes()
        for role in ("prefill", "decode"):
            least, most = getattr(self, f"min_{role}"), getattr(self, f"max_{role}")
            if 0 < most < least:
                raise ConfigError(f"max_{role}", most, f"at least --min-{role} ({least}), or 0")
        cheapest = self.min_prefill * self.price_prefill + max(1, self.min_decode) * self.price_decode
        if 0.0 < self.max_cost < cheapest:
            raise ConfigError("max_cost", self.max_cost, f"at least {cheapest:g}, the cost of the fewest workers, or 0")

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
