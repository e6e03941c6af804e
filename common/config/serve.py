"""Settings of `diptych serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from common.config.field import DURATION, Config, setting


@dataclass(frozen=True)
class ServeConfig(Config):
    """Settings of `diptych serve` itself. All others are settings of the router or of the workers."""

    section: ClassVar[str] = "serve"
    env_prefix: ClassVar[str] = "SERVE"
    about: ClassVar[str] = "Serve a model on this machine: download it, and run its workers and a router."
    examples: ClassVar[tuple[tuple[str, str], ...]] = (
        ("diptych serve", "the built-in SmolLM2-135M"),
        ("diptych serve Qwen/Qwen3-8B --port 9000", "a model from Hugging Face"),
        ("diptych serve ./my-model --prefill 2 --decode 2", "two workers of each kind"),
        ("diptych serve --slo-ttft-ms 500 --slo-tpot-ms 50", "latency goals"),
        ("diptych serve --models-dir ./models", "all models on this machine, loaded on demand"),
    )

    prefill: int = setting(
        1,
        "number of prefill workers per model; with 0, decode workers compute all prompts",
        group="Workers",
        common=True,
        ge=0,
        le=64,
    )
    decode: int = setting(1, "number of decode workers per model", group="Workers", common=True, ge=1, le=64)
    on_demand: bool = setting(
        False,
        "load each model at its first request, and unload it when it is idle",
        group="Load on demand",
        details="Serves all models that `diptych ls` lists, also those that are downloaded later, or those of "
        "--models-file.",
    )
    models_dir: str = setting(
        "",
        "folder of models to load at their first request",
        group="Model",
        details="Implies --on-demand, which also serves the models of the caches. Not with a MODEL or --models-file.",
        common=True,
        metavar="FOLDER",
    )
    unload_after_s: float = setting(
        300.0,
        "seconds without requests after which a model is unloaded; 0 keeps it until another model needs its memory",
        group="Load on demand",
        details="The field `keep_alive` of requests to Ollama's API overrides it.",
        ge=0,
        le=31_536_000,
    )
    max_memory_gib: float = setting(
        0.0,
        "memory for the models that are loaded at the same time, in GiB",
        group="Load on demand",
        details="For another model, the least recently used ones without requests are unloaded. On GPUs it requires "
        "--kv-memory-gib; without it, one model is loaded at a time.",
        default_note="90 % of the memory that is available at start",
        ge=0,
        le=1_048_576,
    )
    autoscale: bool = setting(
        False,
        "start and stop workers to meet --slo-ttft-ms and --slo-tpot-ms",
        group="Autoscaling",
        details="--prefill and --decode are the initial numbers per model. --min-prefill, --max-prefill, "
        "--min-decode and --max-decode are the limits.",
    )
    start_timeout_s: float = setting(
        1800.0,
        "maximum seconds for a process to start and load its model; 0 for no limit",
        group="Timeouts",
        details="If an initial process exceeds it, the service exits. A process that starts later is restarted.",
        **DURATION,
    )
    liveness_s: float = setting(
        90.0,
        "seconds without a successful /health check after which a worker is restarted; 0 disables it",
        group="Timeouts",
        details="The router is restarted after two thirds of this time.",
        **DURATION,
    )
