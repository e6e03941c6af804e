"""The answers to `/load` of all processes of a router as one. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from router.observe import percentiles_of

Load = Mapping[str, Any]

OWN_OF_CLASS = ("num_in_flight", "num_waiting", "num_held", "num_refused")
WORST_OF_CLASS = ("oldest_wait_s", "wait_limit_s")
OWN_OF_WORKER = ("num_booked_requests", "num_dropped_frames", "num_unsent", "num_cuts")
"""What each process has of its own; the rest is a view of the same workers."""


def merged_load(loads: Sequence[Load], counts: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Any]:
    """`loads` as each process answers alone, the one that is asked first, and their times by kind and bucket.

    Requests, rates and times are those of all. The state of workers, plan and events are the first process's view.
    """
    first, *_ = loads
    weights = [load["traffic"]["ttft"]["num"] for load in loads]
    times = {
        kind: [sum(bucket) for bucket in zip(*filter(None, _each(counts, kind)), strict=True)] for kind in counts[0]
    }
    rates = _sums(load["traffic"]["rates"] for load in loads)
    return {
        **first,
        "models": [_model(one, loads, weights) for one in first["models"]],
        "server_load": sum(load["server_load"] for load in loads),
        "stages": _sums(load["stages"] for load in loads),
        "traffic": {**first["traffic"], "rates": rates, **percentiles_of(times)},
        "classes": _classes([load["classes"] for load in loads], weights),
        "workers": [_worker(one, loads) for one in first["workers"]],
    }


def _model(first: Load, loads: Sequence[Load], weights: Sequence[int]) -> dict[str, Any]:
    same = [next((one for one in load["models"] if one["id"] == first["id"]), first) for load in loads]
    return {**first, "classes": _classes([one["classes"] for one in same], weights)}


def _classes(told: Sequence[Sequence[Load]], weights: Sequence[int]) -> list[dict[str, Any]]:
    return [_class(one, told, weights) for one in told[0]]


def _class(first: Load, told: Sequence[Sequence[Load]], weights: Sequence[int]) -> dict[str, Any]:
    """A share that met a goal is weighed by the answers that each process gave lately."""
    same = [next((one for one in classes if one["name"] == first["name"]), first) for classes in told]
    attained = {}
    for goal in first["attainment"]:
        total = sum(weights)
        pairs = zip(weights, same, strict=True)
        of_all = sum(weight * one["attainment"].get(goal, 1.0) for weight, one in pairs)
        attained[goal] = of_all / total if total else first["attainment"][goal]
    sums = {name: sum(_each(same, name)) for name in OWN_OF_CLASS}
    return {**first, **sums, **{name: max(_each(same, name)) for name in WORST_OF_CLASS}, "attainment": attained}


def _worker(first: Load, loads: Sequence[Load]) -> dict[str, Any]:
    same = [one for load in loads for one in load["workers"] if one["address"] == first["address"]]
    return {**first, **{name: sum(_each(same, name)) for name in OWN_OF_WORKER}}


def _sums(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)


def _each(ones: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    return [one[name] for one in ones]
