"""The answer of `/load`: where requests are, what was served lately, how classes and workers fare, what is planned."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from router.dispatch import DispatchLoad
from router.generation import Service
from router.observe import Traffic
from router.planner import Goals, Outlook, goals_of


def load_of(service: Service) -> dict[str, object]:
    """What this process knows of a model, or of all that are behind a front."""
    members = list(service.models.services.values())
    shown = [service] if any(one is service for one in members) else members
    models = [_model(one) for one in shown]
    traffic = service.metrics.traffic.summary(time.monotonic())
    return load_body(service.client.load(), service.outlook(), goals_of(service.config), models, traffic)


def _model(service: Service) -> dict[str, object]:
    """One model, with its own goals, classes and plan: those of a front stand for all of its models."""
    outlook, goals = service.outlook(), goals_of(service.config)
    return {
        "id": service.model_name,
        "max_model_len": service.max_model_len,
        "ready": service.availability[0],
        "goals": _tails(goals.ttft_s, goals.tpot_s),
        "classes": service.client.load().classes,
        "plan": None if outlook is None else _plan(outlook, goals),
    }


def own_load(service: Service) -> dict[str, object]:
    """The same with its times by kind and bucket, from which those of several processes are made."""
    return {"load": load_of(service), "counts": service.metrics.traffic.counts(time.monotonic())}


def load_body(
    load: DispatchLoad,
    outlook: Outlook | None,
    goals: Goals,
    models: Sequence[Mapping[str, object]],
    traffic: Traffic,
) -> dict[str, object]:
    """For `orjson`, which writes dataclasses by itself, and infinity as null."""
    return {
        "server_load": sum(load.stages.values()),
        "models": models,
        "stages": load.stages,
        "traffic": traffic,
        "classes": load.classes,
        "workers": load.workers,
        "plan": None if outlook is None else _plan(outlook, goals),
        "events": load.events,
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
