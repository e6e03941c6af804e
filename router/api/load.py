"""Response of `/load`: request counts by stage, recent traffic, classes, workers, and the plan.

Loads are merged at two levels: those of several models in one process, and the responses of several processes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from common.observe import recent_warnings
from router.dispatch import ClassLoad, DispatchLoad
from router.generation import Models, RouterState, ServedModel
from router.observe import STEP_S, Point, Traffic, percentiles_of
from router.planner import Goals, Outlook, goals_of

log = logging.getLogger(__name__)

Load = Mapping[str, Any]
"""The response of `/load`, as another process sent it."""
K = TypeVar("K")
N = TypeVar("N", int, float)

OWN_OF_CLASS = ("num_in_flight", "num_waiting", "num_held", "num_refused")
WORST_OF_CLASS = ("oldest_wait_s", "wait_limit_s")
OWN_OF_WORKER = ("num_booked_requests", "num_dropped_frames", "num_unsent", "num_cuts")
"""Values that differ between processes. All other values describe the same workers."""


def load_of(router_state: RouterState, model: ServedModel | None = None) -> dict[str, object]:
    """Return the load of a model, or of all models, in this process."""
    models = list(router_state.models.served.values()) if model is None else [model]
    alone = models[0] if len(models) == 1 and (model is not None or router_state.models.loader is None) else None
    load = joined_load([one.client.load() for one in models])
    outlook, goals = (
        (None, goals_of(router_state.config)) if alone is None else (alone.outlook(), goals_of(alone.config))
    )
    traffic = (router_state if alone is None else alone).metrics.traffic.summary(time.monotonic())
    return load_body(load, outlook, goals, [_model(one, router_state.models) for one in models], traffic)


def own_load(router_state: RouterState, model: ServedModel | None = None) -> dict[str, object]:
    """Return `load_of` with latency histograms, from which the percentiles of several processes are computed."""
    metrics = (router_state if model is None else model).metrics
    return {"load": load_of(router_state, model), "counts": metrics.traffic.counts(time.monotonic())}


def sample_of(load: DispatchLoad, traffic: Traffic) -> Point:
    """Return a point of the dashboard's charts; None where there is no data."""
    rates, ttft, tpot, transfer = traffic.rates, traffic.ttft, traffic.tpot, traffic.transfer
    return {
        "inFlight": sum(load.stages.values()),
        "waiting": load.stages.get("queue", 0),
        "requests": rates.requests_per_s,
        "failed": rates.failed_per_s,
        "output": rates.output_tokens_per_s,
        "prompt": rates.prompt_tokens_per_s,
        "transferBytes": rates.transfer_bytes_per_s,
        "ttftMet": _worst(load, "ttft"),
        "tpotMet": _worst(load, "tpot"),
        "ttft50": ttft.p50_ms if ttft.num else None,
        "ttft99": ttft.p99_ms if ttft.num else None,
        "tpot50": tpot.p50_ms if tpot.num else None,
        "tpot99": tpot.p99_ms if tpot.num else None,
        "prefillKv": _blocks_used(load, "prefill"),
        "decodeKv": _blocks_used(load, "decode"),
        "transfer50": transfer.p50_ms if transfer.num else None,
    }


def record_load(router_state: RouterState, now: float) -> None:
    """Add the current load to the history, of each model and of all together. `now` is wall-clock time."""
    history, served, clock = router_state.load_history, router_state.models.served, time.monotonic()
    loads = [model.client.load() for model in served.values()]
    history.add("", sample_of(joined_load(loads), router_state.metrics.traffic.summary(clock)), now)
    if len(loads) > 1:
        for (name, model), load in zip(served.items(), loads, strict=True):
            history.add(name, sample_of(load, model.metrics.traffic.summary(clock)), now)


async def record_loads(router_state: RouterState) -> None:
    """Record the load every `STEP_S` seconds until cancelled."""
    while True:
        await asyncio.sleep(STEP_S)
        try:
            record_load(router_state, time.time())
        except Exception:  # charts must not end the router
            log.exception("the load could not be recorded for the dashboard")


def history_of(router_state: RouterState, model: ServedModel | None) -> dict[str, Any]:
    """Return the load history of a model, or of all models, in this process."""
    several = model is not None and len(router_state.models.served) > 1
    return router_state.load_history.body(model.name if model is not None and several else "", time.time())


def _worst(load: DispatchLoad, goal: str) -> float | None:
    return min((one.attainment[goal] for one in load.classes if goal in one.attainment), default=None)


def _blocks_used(load: DispatchLoad, role: str) -> float | None:
    ready = [one for one in load.workers if one.role == role and one.state == "ready"]
    num_blocks = sum(one.num_blocks for one in ready)
    return 1 - sum(one.num_available_blocks for one in ready) / num_blocks if num_blocks else None


def _model(model: ServedModel, models: Models) -> dict[str, object]:
    """Return one model with its goals, classes and plan."""
    state = None if models.loader is None else models.loader.state(model.name)
    outlook, goals = model.outlook(), goals_of(model.config)
    load, ended_at = model.client.load(), model.metrics.traffic.ended_at
    num_in_flight = sum(load.stages.values())
    return {
        "id": model.name,
        "root": model.files.model_id,
        "max_model_len": model.max_model_len,
        "ready": model.availability[0],
        "goals": _tails(goals.ttft_s, goals.tpot_s),
        "num_in_flight": num_in_flight,
        "idle_s": None if num_in_flight or ended_at is None else time.monotonic() - ended_at,
        "classes": load.classes,
        "plan": None if outlook is None else _plan(outlook, goals),
        "state": None if state is None else state.name,
        "expires_in_s": None if state is None or math.isinf(state.expires_in_s) else state.expires_in_s,
    }


def load_body(
    load: DispatchLoad,
    outlook: Outlook | None,
    goals: Goals,
    models: Sequence[Mapping[str, object]],
    traffic: Traffic,
) -> dict[str, object]:
    """Return the response body for `orjson`, which serialises dataclasses, and infinity as null."""
    return {
        "server_load": sum(load.stages.values()),
        "models": models,
        "stages": load.stages,
        "traffic": traffic,
        "classes": load.classes,
        "workers": load.workers,
        "plan": None if outlook is None else _plan(outlook, goals),
        "events": load.events,
        "warnings": recent_warnings.newest(time.time()),
    }


def _plan(outlook: Outlook, goals: Goals) -> dict[str, object]:
    plan = outlook.plan
    return {
        "pools": plan.pools,
        "quantile": goals.quantile,
        "requests_per_s": outlook.load.rate,
        "goals": _tails(goals.ttft_s, goals.tpot_s),
        "predicted": _tails(plan.predicted.ttft_s, plan.predicted.tpot_s),
        "measured": _tails(*outlook.measured_s),
        "unmet": plan.unmet,
        "held": plan.held,
    }


def _tails(ttft_s: float, tpot_s: float) -> dict[str, float]:
    return {"ttft_ms": ttft_s * 1e3, "tpot_ms": tpot_s * 1e3}


def joined_load(loads: Sequence[DispatchLoad]) -> DispatchLoad:
    """Merge the loads of several models: counts are added, and workers are concatenated."""
    if not loads:
        return DispatchLoad({}, (), {}, {}, {}, 0)
    if len(loads) == 1:
        return loads[0]
    return DispatchLoad(
        stages=_sums(load.stages for load in loads),
        workers=tuple(worker for load in loads for worker in load.workers),
        num_retries=_sums(load.num_retries for load in loads),
        num_failures=_sums(load.num_failures for load in loads),
        num_choices=_sums(load.num_choices for load in loads),
        num_stale_deltas=sum(load.num_stale_deltas for load in loads),
        num_handovers=_sums(load.num_handovers for load in loads),
        num_balanced=_sums(load.num_balanced for load in loads),
        wait_limit_s=min(load.wait_limit_s for load in loads),
        classes=tuple(_joined_class(of_class) for of_class in zip(*(load.classes for load in loads), strict=True)),
        num_taken_back=sum(load.num_taken_back for load in loads),
        num_policy_errors=sum(load.num_policy_errors for load in loads),
        role_changes=_sums(load.role_changes for load in loads),
        events=tuple(sorted((event for load in loads for event in load.events), key=lambda event: event.age_s)),
    )


def _joined_class(loads: Sequence[ClassLoad]) -> ClassLoad:
    """Merge a class of several models: uses the tightest of their goals and the lowest attainment."""
    goals = dict.fromkeys(goal for load in loads for goal in load.attainment)
    return replace(
        loads[0],
        ttft_ms=_tightest(load.ttft_ms for load in loads),
        tpot_ms=_tightest(load.tpot_ms for load in loads),
        num_in_flight=sum(load.num_in_flight for load in loads),
        num_waiting=sum(load.num_waiting for load in loads),
        num_held=sum(load.num_held for load in loads),
        oldest_wait_s=max(load.oldest_wait_s for load in loads),
        wait_limit_s=min(load.wait_limit_s for load in loads),
        num_refused=sum(load.num_refused for load in loads),
        attainment={goal: min(load.attainment[goal] for load in loads if goal in load.attainment) for goal in goals},
    )


def _tightest(goals_ms: Iterable[float]) -> float:
    """Return the lowest goal, ignoring 0, which means none."""
    return min(filter(None, goals_ms), default=0.0)


def merged_load(loads: Sequence[Load], counts: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Any]:
    """Merge the `loads` of all processes, that of the asked one first. `counts` are their latency histograms.

    Requests, rates and latencies cover all processes. Workers' states, plan and events are those of the first process.
    """
    first, *_ = loads
    weights = [load["traffic"]["ttft"]["num"] for load in loads]
    times = {
        kind: [sum(bucket) for bucket in zip(*filter(None, _each(counts, kind)), strict=True)] for kind in counts[0]
    }
    rates = _sums(load["traffic"]["rates"] for load in loads)
    return {
        **first,
        "models": [_merged_model(one, loads, weights) for one in first["models"]],
        "server_load": sum(load["server_load"] for load in loads),
        "stages": _sums(load["stages"] for load in loads),
        "traffic": {**first["traffic"], "rates": rates, **percentiles_of(times)},
        "classes": _merged_classes([load["classes"] for load in loads], weights),
        "workers": [_merged_worker(one, loads) for one in first["workers"]],
        "warnings": sorted((one for load in loads for one in load["warnings"]), key=lambda one: one["age_s"]),
    }


def _merged_model(first: Load, loads: Sequence[Load], weights: Sequence[int]) -> dict[str, Any]:
    same = [next((one for one in load["models"] if one["id"] == first["id"]), first) for load in loads]
    num_in_flight = sum(_each(same, "num_in_flight"))
    idle_s = None if num_in_flight else min((one for one in _each(same, "idle_s") if one is not None), default=None)
    merged = {"num_in_flight": num_in_flight, "idle_s": idle_s}
    return {**first, **merged, "classes": _merged_classes([one["classes"] for one in same], weights)}


def _merged_classes(per_process: Sequence[Sequence[Load]], weights: Sequence[int]) -> list[dict[str, Any]]:
    return [_merged_class(one, per_process, weights) for one in per_process[0]]


def _merged_class(first: Load, per_process: Sequence[Sequence[Load]], weights: Sequence[int]) -> dict[str, Any]:
    """Merge a class. Attainments are weighted by the number of recent answers of each process."""
    same = [next((one for one in classes if one["name"] == first["name"]), first) for classes in per_process]
    attained = {}
    for goal in first["attainment"]:
        total = sum(weights)
        pairs = zip(weights, same, strict=True)
        of_all = sum(weight * one["attainment"].get(goal, 1.0) for weight, one in pairs)
        attained[goal] = of_all / total if total else first["attainment"][goal]
    sums = {name: sum(_each(same, name)) for name in OWN_OF_CLASS}
    return {**first, **sums, **{name: max(_each(same, name)) for name in WORST_OF_CLASS}, "attainment": attained}


def _merged_worker(first: Load, loads: Sequence[Load]) -> dict[str, Any]:
    same = [one for load in loads for one in load["workers"] if one["address"] == first["address"]]
    return {**first, **{name: sum(_each(same, name)) for name in OWN_OF_WORKER}}


def _sums(counts: Iterable[Mapping[K, N]]) -> dict[K, N]:
    total: Counter[K] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)


def _each(ones: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    return [one[name] for one in ones]
