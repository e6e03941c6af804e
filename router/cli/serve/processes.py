"""The settings of every process that `diptych serve` starts, from one flag list, file and environment.

An option holds for each process that has it; `--prefill-NAME` and `--decode-NAME` hold for one pool and win.
Everything is checked here, before the first process starts.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

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
    fields_of,
)
from common.errors import ConfigError
from common.machine import AvailableGPUs, count_gpus, find_gpus, gpu_refusal, placement_message, with_device
from common.wire import Role
from router.models import table_of

C = TypeVar("C", bound=Config)
W = TypeVar("W", bound=WorkerConfig)
THRESHOLD = "local_prefill_threshold"
"""0 unless given where decode workers run on a GPU: a prompt in a recorded step would have it run kernel by kernel."""
P = TypeVar("P", bound=RouterConfig | WorkerConfig)

ROUTER_DRAIN_S, WORKER_DRAIN_S = 3.0, 2.0
"""A process drains at most this long, so that it ends within the supervisor's grace."""

OWN = frozenset(("config", "curve_key", "curve_authorized", "kubernetes_api", "kubernetes_credentials"))
"""Fields that the supervisor sets itself, for each process."""
DISCOVERY = (
    *("discovery", "prefill_services", "decode_services", "discovery_namespace"),
    "discovery_file",
)
PLANNER = ("planner", "prefill_deployment", "decode_deployment", "planner_lease")
ROUTER_OWN = OWN | {"prefill", "decode", *PLANNER, *DISCOVERY}
ADDRESSES = ("host", "port", "kv_port", "lend_port", "http_port", "advertise_host", "allow_remote", "address_file")
WORKER_OWN = OWN | {"worker_id", "core_share", "pod_deletion_cost", *ADDRESSES}

EPILOG = """\
Worker options can be set for one pool alone: --prefill-threads 2, --decode-cores 1, --decode-max-num-seqs 128.
Every option but those of `serve` itself is also an environment variable (DIPTYCH_MAX_NUM_SEQS, for one kind of process
DIPTYCH_DECODE_MAX_NUM_SEQS) and a key in the TOML file (max_num_seqs at the top, or under [router], [prefill_worker],
[decode_worker]); --prefill, --decode and --liveness-s are DIPTYCH_SERVE_PREFILL and so on, or keys under [serve].
A flag wins over the environment, the environment over the file. docs/reference/configuration.md lists everything."""


def on_gpus(workers: Sequence[WorkerConfig], num_gpus: int, *, may_share: bool = False) -> list[WorkerConfig]:
    """Assign GPUs to the workers whose `--device cuda` names none.

    Each worker gets its own GPUs. Workers share the GPU of a machine that has one, and with `may_share` also several
    GPUs if there are too few. Workers on the same GPU divide its memory. Raises ConfigError if there are several GPUs,
    but fewer than the workers need.
    """
    choosing = [i for i, worker in enumerate(workers) if worker.device == "cuda"]
    if num_gpus <= 1 and all(workers[i].ranks_per_host == 1 for i in choosing):
        return _sharing(workers)
    named = {index for worker in workers if worker.device.startswith("cuda:") for index in gpus_of(worker)}
    users, given = (
        Counter(index for worker in workers if worker.device != "cuda" for index in gpus_of(worker)),
        [*workers],
    )
    for i in sorted(choosing, key=lambda i: -workers[i].ranks_per_host):  # first those that need neighbours
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


def gpus_of(worker: WorkerConfig) -> range:
    """The GPUs of a worker: neighbours from the one that `device` names; the first without a number."""
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
    of_each = f" of {' or '.join(map(str, each))} GPUs each" if each != [1] else ""
    seen = f"this machine has {num_gpus}" + f", of which other workers name {num_named}" * bool(num_named)
    return (
        f"more GPUs: {len(workers)} workers{of_each} need {needed}, and {seen}; start fewer workers, or name the GPUs "
        "that they are to share, as in --prefill-device cuda:0 --decode-device cuda:0"
    )


@dataclass(frozen=True)
class ServePlan:
    """The settings of every process to start. Worker i of a pool is named `prefill-i` or `decode-i`.

    Each of the `models` has the workers of one model, in the order of the models; their numbers run on. A model whose
    file says that it has no prefill pool has no prefill workers.
    With `autoscale` workers come and go: `kinds` are the settings of any worker of a role, but its name and its model.
    """

    router: RouterConfig
    prefill: tuple[PrefillWorkerConfig, ...]
    decode: tuple[DecodeWorkerConfig, ...]
    start_timeout_s: float
    liveness_s: float
    autoscale: bool = False
    kinds: Mapping[Role, WorkerConfig] = dataclasses.field(default_factory=dict)
    models: tuple[str, ...] = ()
    placement: str = ""
    """The choice for `--device auto` and its reason; "" if no worker has this setting."""


def fields_set_by(cls: type[Config]) -> list[Field]:
    """The fields of a process that the user of `serve` may set."""
    own = ROUTER_OWN if cls is RouterConfig else WORKER_OWN
    return [field for field in fields_of(cls) if field.name not in own]


def shared_fields() -> list[Field]:
    """The fields of router and workers, each name once; the help names a default that differs between the pools."""
    union: dict[str, Field] = {}
    for cls in (RouterConfig, DecodeWorkerConfig, PrefillWorkerConfig):
        for field in fields_set_by(cls):
            known = union.setdefault(field.name, field)
            if known.default != field.default:
                note = f"{known.rule.help}; prefill workers: {field.render(field.default)}"
                union[field.name] = dataclasses.replace(known, rule=dataclasses.replace(known.rule, help=note))
    return list(union.values())


def build_parser() -> FlagParser:
    """Every flag of `diptych serve`; those for one pool alone are accepted but not listed."""
    parser = FlagParser("diptych serve", ServeConfig.about, EPILOG)
    config = [field for field in fields_of(RouterConfig) if field.name == "config"]
    parser.add_fields([*fields_of(ServeConfig), *shared_fields(), *config])
    parser.add_fields(fields_set_by(PrefillWorkerConfig), prefix="prefill-", visible=False)
    parser.add_fields(fields_set_by(DecodeWorkerConfig), prefix="decode-", visible=False)
    return parser


def read_plan(
    argv: Sequence[str], environ: Mapping[str, str] | None = None, num_cores: int = 0, num_gpus: int | None = None
) -> ServePlan:
    """Merge all sources. Raises ConfigError.

    A worker without a `threads` setting may use `num_cores` (0: those of this process), in turns with the others.
    Workers are spread over `num_gpus` (None: the number that the driver shows, or for `--device auto` the number that a
    process with torch finds).
    """
    environ = os.environ if environ is None else environ
    flags = build_parser().flags(argv)
    sources = Sources.open(flags.get("config", environ.get("DIPTYCH_CONFIG", "")), environ, ServeConfig)

    def merge(cls: type[C], own: frozenset[str], prefix: str) -> C:
        values = sources.values(cls, skip=own)
        for field in fields_of(cls):
            for name in (field.name, prefix + field.name) if prefix else (field.name,):
                if name in flags and field.name not in own:
                    values[field.name] = field.parse(flags[name])
        return cls(**values)

    serve = merge(ServeConfig, frozenset(), "")
    cores = num_cores or len(os.sched_getaffinity(0))
    prefill = merge(PrefillWorkerConfig, WORKER_OWN, "prefill-")
    decode = merge(DecodeWorkerConfig, WORKER_OWN, "decode-")
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
    # A worker that leaves while the service goes on may hand its streams over in peace.
    drain_s = prefill.drain_timeout_s if serve.autoscale else WORKER_DRAIN_S
    router = _hurried(merge(RouterConfig, ROUTER_OWN, ""), ROUTER_DRAIN_S)
    if decode.on_gpu and THRESHOLD not in flags and THRESHOLD not in sources.values(RouterConfig, skip=ROUTER_OWN):
        router = dataclasses.replace(router, local_prefill_threshold=0)
    entries = table_of(router).models
    models = tuple(entry.model for entry in entries)
    if len(models) > 1 and (named := prefill.lora or decode.lora):
        allowed = "left out with several models: load each adapter at run time, with --max-loras"
        raise ConfigError("lora", named[0], allowed)

    if serve.autoscale:  # workers come and go, so those of one name share one GPU
        same = prefill.device == decode.device
        prefill = _divided(prefill, len(models) * (serve.prefill + serve.decode * same))
        decode = _divided(decode, len(models) * (serve.decode + serve.prefill * same))

    def workers(config: W, role: Role, num: int) -> tuple[W, ...]:
        served = [entry.model for entry in entries if role == "decode" or entry.has_prefill]
        ours = [dataclasses.replace(config, model=model) for model in served for _ in range(num)]
        return tuple(_worker(own, f"{role}-{i}", cores, drain_s) for i, own in enumerate(ours))

    every: list[WorkerConfig] = [*workers(prefill, "prefill", serve.prefill), *workers(decode, "decode", serve.decode)]
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
        placement=placement,
    )


def _refusal(pools: Sequence[WorkerConfig], gpus: AvailableGPUs) -> str:
    """Return why the pools with `--device auto` cannot use GPUs, or "". They exchange KV, so all or none do."""
    if any(pool.device == "cpu" for pool in pools):
        return "the other pool is on the CPU"
    return next(filter(None, (gpu_refusal(pool, gpus) for pool in pools if pool.device == AUTO)), "")


def _divided(config: W, num_workers: int) -> W:
    """Workers of one GPU share its memory."""
    if not config.on_gpu or num_workers < 2:
        return config
    return dataclasses.replace(config, gpu_memory_utilization=config.gpu_memory_utilization / num_workers)


def _planning(router: RouterConfig, serve: ServeConfig, num_cores: int) -> RouterConfig:
    """The router plans the pools of each model, within the same bounds. Raises ConfigError for a start outside of them.

    A bound that is not given allows what a model starts with, and half of the cores for each pool of it.
    """
    most_prefill = _most(router, "prefill", serve.prefill, num_cores // 2)
    most_decode = _most(router, "decode", serve.decode, num_cores // 2)
    return dataclasses.replace(router, planner="advice", max_prefill=most_prefill, max_decode=most_decode)


def _most(bounds: RouterConfig, role: Role, num: int, usual: int) -> int:
    """The most workers of a role that a model may have, which starts with `num`. Raises ConfigError."""
    least, most = getattr(bounds, f"min_{role}"), int(getattr(bounds, f"max_{role}"))
    if num < least or 0 < most < num:
        raise ConfigError(role, num, f"a number from --min-{role} ({least}) to --max-{role} ({most})")
    return most or max(num, least, usual)


def _worker(config: W, name: str, threads: int, drain_s: float) -> W:
    """A pinned worker uses the cores it is pinned to; another may use all cores while it computes alone."""
    own = threads if config.threads == 0 and not config.cores else config.threads
    return dataclasses.replace(_hurried(config, drain_s), worker_id=name, threads=own)


def _hurried(config: P, drain_s: float) -> P:
    """Shorten the drain: a user who presses Ctrl-C does not wait for running answers."""
    return dataclasses.replace(config, drain_timeout_s=min(config.drain_timeout_s, drain_s))
