"""Settings of `diptych serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from common.config.field import DURATION, Config, setting


@dataclass(frozen=True)
class ServeConfig(Config):
    """One machine: how many of each worker. All else is a setting of the router or of the workers."""

    section: ClassVar[str] = "serve"
    env_prefix: ClassVar[str] = "SERVE"
    about: ClassVar[str] = (
        "A whole service on this machine: fetches the models, starts workers for each and a router, restarts what dies "
        "or hangs."
    )

    prefill: int = setting(
        1, "prefill workers to start for each model; 0: decode workers do everything", group="Workers", ge=0, le=64
    )
    decode: int = setting(1, "decode workers to start for each model", group="Workers", ge=1, le=64)
    autoscale: bool = setting(
        False,
        "start and drain workers of each model by the router's plan: --prefill and --decode are the numbers at the "
        "start, --min-prefill, --max-prefill, --min-decode and --max-decode the bounds, of each model; --slo-ttft-ms "
        "and --slo-tpot-ms are the goals",
        group="Workers",
    )
    start_timeout_s: float = setting(
        1800.0,
        "seconds after its start within which a process must have loaded and answer: if one of the first does not, the "
        "service ends; a later one is ended and started again; 0: any time",
        group="Deadlines",
        **DURATION,
    )
    liveness_s: float = setting(
        90.0,
        "seconds without a good answer of /health after which a started worker is ended and started again (the router "
        "after two thirds of them); 0: never",
        group="Deadlines",
        **DURATION,
    )
