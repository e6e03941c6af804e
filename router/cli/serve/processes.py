"""Settings of the processes that `diptych serve` starts, from its flags, the file and the environment.

An option applies to each process that has it. `--prefill-NAME` and `--decode-NAME` apply to one pool and win.
All settings, and the files of the router that they name, are validated before the first process starts.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from common.config import (
    AUTO,
    Config,
    DecodeWorkerConfig,
    Field,
    FlagParser,
    PrefillWorkerConfig,
    RouterConfig,
    ServeConfig,
    Sources,
    WorkerConfig,
    as_flag,
    describe,
    fields_of,
    located,
    pipeline_argument,
)
from common.errors import ConfigError, UsageError
from common.machine import (
    AvailableGPUs,
    count_gpus,
    find_gpus,
    gpu_refusal,
    placement_message,
    with_device,
)
from common.wire import Role
from router.models import table_of
from router.planner import ServiceSettings, WorkerMemory, memory_budget

C = TypeVar("C", bound=Config)
W = TypeVar("W", bound=WorkerConfig)
THRESHOLD = "local_prefill_threshold"
"""Its default is 0 with decode workers on GPUs, because a prompt in a step prevents the use of CUDA graphs."""
P = TypeVar("P", bound=RouterConfig | WorkerConfig)

ROUTER_DRAIN_S, WORKER_DRAIN_S = 3.0, 2.0
"""Maximum drain time, so that a process exits within the supervisor's grace period."""

OWN = frozenset(("config", "curve_key", "curve_authorized", "kubernetes_api", "kubernetes_credentials"))
"""Fields that the supervisor sets for each process."""
DISCOVERY = (
    *("discovery", "prefill_services", "decode_services", "discovery_namespace"),
    "discovery_file",
)
PLANNER = ("on_demand_folder", "planner", "prefill_deployment", "decode_deployment", "planner_lease")
ROUTER_OWN = OWN | {"prefill", "decode", *PLANNER, *DISCOVERY}
ADDRESSES = ("host", "port", "kv_port", "lend_port", "http_port", "advertise_host", "allow_remote", "address_file")
WORKER_OWN = OWN | {"worker_id", "core_share", "weight_share", "pod_deletion_cost", *ADDRESSES}

NOTES = """\
Worker options can be set for one pool: --prefill-threads 2, --decode-cores 1, --decode-max-num-seqs 128.
Every option is also an environment variable and a key of the TOML file (--config FILE). For --max-num-seqs:
  DIPTYCH_MAX_NUM_SEQS=8           in the environment, for both kinds of worker
  DIPTYCH_DECODE_MAX_NUM_SEQS=8    in the environment, for decode workers
  max_num_seqs = 8                 in the file, at the top or under [prefill_worker] or [decode_worker]
Options of serve itself, such as --prefill, are DIPTYCH_SERVE_PREFILL or a key under [serve].
A flag wins over the environment, and the environment over the file. See docs/reference/configuration.md."""


def on_gpus(workers: Sequence[WorkerConfig], num_gpus: int, *, may_share: bool = False) -> list[WorkerConfig]:
    """Assign GPUs to the workers with `--device cuda`.

    Each worker gets its own GPUs. Workers share a single GPU, and with `may_share` also several GPUs if there are too
    few. Workers on the same GPU divide its memory. Raises ConfigError if there are several GPUs but not enough.
    """
    choosing = [i for i, worker in enumerate(workers) if worker.device == "cuda"]
    if num_gpus <= 1 and all(workers[i].ranks_per_host == 1 for i in choosing):
        return _sharing(workers)
    named = {index for worker in workers if worker.device.startswith("cuda:") for index in gpus_of(worker)}
    users, given = (
        Counter(index for worker in workers if worker.device != "cuda" for index in gpus_of(worker)),
        [*workers],
    )
    for i in sorted(choosing, key=lambda i: -workers[i].ranks_per_host):  # workers with several GPUs first
        size = workers[i].ranks_per_host
        places = [range(first, first + size) for first in range(num_gpus - size + 1)]
        place = min(
            places, key=lambda place: (max(users[i] for i in place), sum(users[i] for i in place)), default=range(0)
        )
        if not place or (max(users[index] for index in place) and not may_share):
            raise ConfigError("device", "cuda", _too_few([workers[i] for i in choosing], num_gpus, len(named)))
        users.update(place)
        given[i] = dataclasses.replace(workers[i], device=f"cuda:{place[0]}")
    return _sharing(given)


def with_own_cores(workers: Sequence[WorkerConfig], cores: Sequence[int]) -> list[WorkerConfig]:
    """Divide the cores among vLLM's workers on the CPU that have none. vLLM binds its threads to their cores."""
    choosing = [i for i, one in enumerate(workers) if one.engine == "vllm" and not one.on_gpu and not one.cores]
    found = [*workers]
    for place, i in enumerate(choosing):
        first, end = (len(cores) * number // len(choosing) for number in (place, place + 1))
        own = cores[first:end] or [cores[place % len(cores)]]
        found[i] = dataclasses.replace(workers[i], cores=",".join(map(str, own)))
    return found


def check_vllm_plan(config: WorkerConfig, varies: str) -> None:
    """Check that the supervisor can divide cores and GPUs among workers with `--engine vllm`. Raises ConfigError.

    `varies` is the setting with which the number of workers varies, or "".
    """
    if config.engine != "vllm":
        return
    if varies and not config.on_gpu and not config.cores:
        allowed = "omitted with --engine vllm on a CPU, because each worker needs its own cores"
        raise ConfigError(varies, True, allowed)
    if config.on_gpu and (argument := pipeline_argument(config.engine_args)):
        raise UsageError(
            "engine_args",
            f"{argument} is not supported by diptych serve, which places workers on GPUs by --tensor-parallel-size; "
            "run diptych prefill-worker, decode-worker and router instead",
        )


def gpus_of(worker: WorkerConfig) -> range:
    """Return the GPUs of a worker: consecutive ones from that of `device`, or from the first."""
    if not worker.on_gpu:
        return range(0)
    first = worker.device_index
    return range(first, first + worker.ranks_per_host)


def _sharing(workers: Sequence[WorkerConfig]) -> list[WorkerConfig]:
    """Divide the memory of each GPU among its workers."""
    users = Counter(index for worker in workers for index in gpus_of(worker))
    found = []
    for worker in workers:
        count = max((users[index] for index in gpus_of(worker)), default=1)
        share = worker.gpu_memory_utilization / count
        found.append(worker if count == 1 else dataclasses.replace(worker, gpu_memory_utilization=share))
    return found


def _too_few(workers: Sequence[WorkerConfig], num_gpus: int, num_named: int) -> str:
    needed = sum(worker.ranks_per_host for worker in workers)
    each = sorted({worker.ranks_per_host for worker in workers})
    of_each = f" with {' or '.join(map(str, each))} GPUs each" if each != [1] else ""
    seen = f"this machine has {num_gpus}" + f", and other workers use {num_named}" * bool(num_named)
    return (
        f"cuda:N or cpu, because {len(workers)} workers{of_each} need {needed} GPUs and {seen}; start fewer workers, "
        "or share GPUs with --prefill-device cuda:0 --decode-device cuda:0"
    )


@dataclass(frozen=True)
class ServePlan:
    """The settings of all processes to start. Worker i of a pool is named `prefill-i` or `decode-i`.

    Workers are ordered by `models`. A model without a prefill pool in the models file has no prefill workers. With
    `autoscale` and `on_demand`, `kinds` holds the settings of a new worker of a role, except for its name and model.
    With `on_demand`, no worker is started with the service, and `models` is empty.
    """

    router: RouterConfig
    prefill: tuple[PrefillWorkerConfig, ...]
    decode: tuple[DecodeWorkerConfig, ...]
    start_timeout_s: float
    liveness_s: float
    autoscale: bool = False
    kinds: Mapping[Role, WorkerConfig] = dataclasses.field(default_factory=dict)
    models: tuple[str, ...] = ()
    on_demand: ServiceSettings | None = None
    placement: str = ""
    """The choice for `--device auto` with its reason, or "" if no worker has this setting."""

    @property
    def engine(self) -> str:
        """Engine of the workers."""
        return self.kinds["decode"].engine


def fields_set_by(cls: type[Config]) -> list[Field]:
    """Return the fields of a process that the user of `serve` can set."""
    own = ROUTER_OWN if cls is RouterConfig else WORKER_OWN
    return [field for field in fields_of(cls) if field.name not in own]


def shared_fields() -> list[Field]:
    """Return the fields of router and workers, each name once. A default that differs is noted in the help."""
    union: dict[str, Field] = {}
    for cls in (RouterConfig, DecodeWorkerConfig, PrefillWorkerConfig):
        for field in fields_set_by(cls):
            known = union.setdefault(field.name, field)
            if known.default != field.default:
                note = f"{known.rule.default_note}; {field.render(field.default)} for prefill workers"
                union[field.name] = dataclasses.replace(known, rule=dataclasses.replace(known.rule, default_note=note))
    return list(union.values())


def build_parser() -> FlagParser:
    """Build the parser of `diptych serve`. Flags for one pool are accepted but not listed."""
    parser = FlagParser("diptych serve", ServeConfig.about, ServeConfig.examples, NOTES)
    fields = {field.name: field for field in fields_of(RouterConfig)}
    parser.add_model(describe(fields["model"]))
    config = [field for field in fields_of(RouterConfig) if field.name == "config"]
    parser.add_fields([*fields_of(ServeConfig), *shared_fields(), *config])
    parser.add_fields(fields_set_by(PrefillWorkerConfig), prefix="prefill-", is_listed=False)
    parser.add_fields(fields_set_by(DecodeWorkerConfig), prefix="decode-", is_listed=False)
    return parser


def read_plan(
    argv: Sequence[str], environ: Mapping[str, str] | None = None, num_cores: int = 0, num_gpus: int | None = None
) -> ServePlan:
    """Merge all sources into a plan. Raises ConfigError.

    `num_cores` is the number of threads of a worker without `threads`; 0 for the cores of this process. `num_gpus` is
    the number of GPUs; None for the number that the driver reports, or that PyTorch finds for `--device auto`.
    """
    environ = os.environ if environ is None else environ
    flags = build_parser().flags(argv)
    sources = Sources.open(flags.get("config", environ.get("DIPTYCH_CONFIG", "")), environ, ServeConfig)

    def merge(cls: type[C], own: frozenset[str], prefix: str) -> C:
        values = sources.values(cls, skip=own)
        for field in fields_of(cls):
            names = (field.name, prefix + field.name) if prefix else (field.name,)
            given = [parse(field, name) for name in names if name in flags and field.name not in own]
            if given:
                values[field.name] = sum(given, ()) if field.rule.trailing else given[-1]
        try:
            return cls(**values)
        except ConfigError as error:
            raise located(error, cls, flags, sources, prefix) from error

    def parse(field: Field, name: str) -> Any:
        try:
            return field.parse(flags[name])
        except ConfigError as error:
            raise error.located(as_flag(name, error.value)) from error

    serve = merge(ServeConfig, frozenset(), "")
    named = "model" in flags or "model" in sources.values(RouterConfig, skip=ROUTER_OWN)
    if named and (given := [name for name in ("on_demand", "models_dir") if name in flags]):
        allowed = "omitted with a MODEL: requests name the model to load"
        raise ConfigError(given[0], flags[given[0]], allowed).located(as_flag(given[0], flags[given[0]]))
    cores = num_cores or len(os.sched_getaffinity(0))
    prefill = merge(PrefillWorkerConfig, WORKER_OWN, "prefill-")
    decode = merge(DecodeWorkerConfig, WORKER_OWN, "decode-")
    if serve.prefill and prefill.engine != decode.engine:
        allowed = f"{decode.engine}, the engine of the decode workers, because each engine has its own KV layout"
        raise ConfigError("engine", prefill.engine, allowed).located(as_flag("prefill_engine", prefill.engine))
    is_auto = AUTO in (prefill.device, decode.device)
    placement = ""
    if is_auto:
        gpus = find_gpus(environ) if num_gpus is None else AvailableGPUs(num_gpus, "" if num_gpus else "no GPU")
        refusal = _refusal([prefill, decode], gpus)
        prefill, decode, placement, num_gpus = (
            with_device(prefill, refusal),
            with_device(decode, refusal),
            placement_message(refusal),
            gpus.num_gpus,
        )
    # With autoscaling, a worker that is removed has time to hand over its streams.
    drain_s = prefill.drain_timeout_s if serve.autoscale else WORKER_DRAIN_S
    router = _hurried(merge(RouterConfig, ROUTER_OWN, ""), ROUTER_DRAIN_S)
    if decode.on_gpu and THRESHOLD not in flags and THRESHOLD not in sources.values(RouterConfig, skip=ROUTER_OWN):
        router = dataclasses.replace(router, local_prefill_threshold=0)
    if router.models_file and (folder := flags.get("models_dir")):
        allowed = "omitted with --models-file, whose models are the only ones"
        raise ConfigError("models_dir", folder, allowed).located(as_flag("models_dir", folder))
    is_fixed = named or bool(router.models_file and not serve.on_demand)
    on_demand = None if is_fixed else _on_demand(serve, prefill, decode)
    if on_demand is not None:
        _check_on_demand(serve, router, decode)
    entries = table_of(router).models if on_demand is None else ()
    models = tuple(entry.model for entry in entries)
    if (len(models) > 1 or on_demand is not None) and (loras := prefill.lora or decode.lora):
        allowed = "omitted with several models; set --max-loras and load adapters at run time"
        raise ConfigError("lora", loras[0], allowed)

    varies = "on_demand" if on_demand is not None else "autoscale" if serve.autoscale else ""
    check_vllm_plan(prefill, varies)
    check_vllm_plan(decode, varies)
    if serve.autoscale or on_demand is not None:  # the number of workers varies: those on one device share its memory
        same, num_models = prefill.device == decode.device, max(1, len(models))
        prefill = _divided(prefill, num_models * (serve.prefill + serve.decode * same))
        decode = _divided(decode, num_models * (serve.decode + serve.prefill * same))

    def workers(config: W, role: Role, num: int) -> tuple[W, ...]:
        served = [entry.model for entry in entries if role == "decode" or entry.has_prefill]
        ours = [dataclasses.replace(config, model=model) for model in served for _ in range(num)]
        return tuple(_worker(own, f"{role}-{i}", cores, drain_s) for i, own in enumerate(ours))

    every: list[WorkerConfig] = [*workers(prefill, "prefill", serve.prefill), *workers(decode, "decode", serve.decode)]
    every = with_own_cores(every, range(num_cores) if num_cores else sorted(os.sched_getaffinity(0)))
    if not serve.autoscale:
        every = on_gpus(every, count_gpus(environ) if num_gpus is None else num_gpus, may_share=is_auto)
    return ServePlan(
        router=_planning(router, serve, cores) if serve.autoscale else router,
        prefill=tuple(one for one in every if isinstance(one, PrefillWorkerConfig)),
        decode=tuple(one for one in every if isinstance(one, DecodeWorkerConfig)),
        start_timeout_s=serve.start_timeout_s,
        liveness_s=serve.liveness_s,
        autoscale=serve.autoscale,
        kinds={"prefill": _worker(prefill, "", cores, drain_s), "decode": _worker(decode, "", cores, drain_s)},
        models=models,
        on_demand=on_demand,
        placement=placement,
    )


def _on_demand(serve: ServeConfig, prefill: WorkerConfig, decode: WorkerConfig) -> ServiceSettings | None:
    """Return the settings of load on demand, None without it."""
    if not (serve.on_demand or serve.models_dir):
        return None
    return ServiceSettings(
        models_dir=str(Path(serve.models_dir).expanduser().absolute()) if serve.models_dir else "",
        keep_s=serve.unload_after_s,
        budget=memory_budget(serve.max_memory_gib),
        num_prefill=serve.prefill,
        num_decode=serve.decode,
        prefill=WorkerMemory.of(prefill),
        decode=WorkerMemory.of(decode),
    )


def _check_on_demand(serve: ServeConfig, router: RouterConfig, decode: WorkerConfig) -> None:
    """Raise ConfigError for settings that exclude load on demand."""
    if decode.on_gpu and (decode.kv_memory_gib or decode.num_blocks) and not serve.max_memory_gib:
        allowed = "the GPU memory for models, because --kv-memory-gib or --num-blocks is set"
        raise ConfigError("max_memory_gib", 0, allowed)
    if serve.models_dir and not Path(serve.models_dir).expanduser().is_dir():
        raise ConfigError("models_dir", serve.models_dir, "a folder that exists")
    if serve.autoscale:
        raise ConfigError("autoscale", True, "omitted with --on-demand")
    if router.router_processes > 1:
        raise ConfigError("router_processes", router.router_processes, "1 with --on-demand")
    if router.lora_file:
        raise ConfigError("lora_file", router.lora_file, "omitted with --on-demand")
    if router.served_model_name:
        raise ConfigError("served_model_name", router.served_model_name, "omitted with --on-demand")


def _refusal(pools: Sequence[WorkerConfig], gpus: AvailableGPUs) -> str:
    """Return why the pools with `--device auto` cannot use GPUs, or "". All pools use GPUs, or none."""
    if any(pool.device == "cpu" for pool in pools):
        return "the other pool is on the CPU"
    return next(filter(None, (gpu_refusal(pool, gpus) for pool in pools if pool.device == AUTO)), "")


def _divided(config: W, num_workers: int) -> W:
    """Divide the memory of a GPU among `num_workers`."""
    if not config.on_gpu or num_workers < 2:
        return config
    return dataclasses.replace(config, gpu_memory_utilization=config.gpu_memory_utilization / num_workers)


def _planning(router: RouterConfig, serve: ServeConfig, num_cores: int) -> RouterConfig:
    """Return the router's settings with the limits of the planner, which apply to each model.

    The default limit of a pool is half of the cores, but at least its initial size. Raises ConfigError if the initial
    size is outside the limits.
    """
    most_prefill = _most(router, "prefill", serve.prefill, num_cores // 2)
    most_decode = _most(router, "decode", serve.decode, num_cores // 2)
    return dataclasses.replace(router, planner="advice", max_prefill=most_prefill, max_decode=most_decode)


def _most(bounds: RouterConfig, role: Role, num: int, usual: int) -> int:
    """Return the maximum number of workers of a role for a model that starts with `num`. Raises ConfigError."""
    least, most = getattr(bounds, f"min_{role}"), int(getattr(bounds, f"max_{role}"))
    if num < least or 0 < most < num:
        raise ConfigError(role, num, f"{least} (--min-{role}) to {most} (--max-{role})")
    return most or max(num, least, usual)


def _worker(config: W, name: str, threads: int, drain_s: float) -> W:
    """Name a worker and set its threads. Without `cores` or `threads` it uses all cores."""
    own = threads if config.threads == 0 and not config.cores else config.threads
    return dataclasses.replace(_hurried(config, drain_s), worker_id=name, threads=own)


def _hurried(config: P, drain_s: float) -> P:
    """Limit the drain time, because a user who presses Ctrl-C does not wait for running requests."""
    return dataclasses.replace(config, drain_timeout_s=min(config.drain_timeout_s, drain_s))
