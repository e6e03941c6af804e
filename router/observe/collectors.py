"""Collectors that are read at scrape time: the dispatcher's load, the pools and their plan.

Autoscalers and operators use the metrics of pools and plan; see docs/reference/metrics.md.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from common.observe import Families, Samples
from common.wire import ROLES
from router.dispatch import Dispatcher, DispatchLoad
from router.fleet import DiscoveryStatus
from router.observe.slo import SLOWindow
from router.planner import Outlook

WORKER = ("worker", "role")


class LoadCollector(Collector):
    """Collector of the dispatcher's load."""

    def __init__(self, load: Callable[[], DispatchLoad], labels: Mapping[str, str]) -> None:
        self._load, self._families = load, Families(labels)

    def collect(self) -> Iterable[Metric]:
        load, gauge, counter = self._load(), self._families.gauge, self._families.counter
        takeovers = load.num_retries.get("decode", 0)
        yield gauge(
            "diptych_requests_in_flight",
            "Sequences in the router, by stage: queue, prefill, transfer, decode",
            _by(load.stages),
            ("stage",),
        )
        yield gauge("diptych_wait_limit_seconds", "Maximum queueing time of a new request", load.wait_limit_s)
        yield counter(
            "diptych_retries",
            "Moves to another worker, by the failed worker's role: prefill, decode",
            _by(load.num_retries),
            ("role",),
        )
        yield counter("diptych_takeovers", "Answers continued by another decode worker", takeovers)
        yield counter(
            "diptych_failures",
            "Failed sequences, by error: Overloaded, Unavailable, DeadlineExceeded, InvalidRequest, InternalError",
            _by(load.num_failures),
            ("reason",),
        )
        yield counter(
            "diptych_placements",
            "Sequences placed, by kind: remote (both workers), local (decode worker), prefill (prefill worker)",
            _by(load.num_choices),
            ("kind",),
        )
        yield counter(
            "diptych_routing_policy_errors",
            "Failed decisions of --routing-policy, replaced by the built-in policy",
            load.num_policy_errors,
        )
        yield counter(
            "diptych_handovers",
            "Hand-overs of running answers, by outcome: done, failed (the first worker continues), ended (first)",
            _by(load.num_handovers),
            ("outcome",),
        )
        yield counter(
            "diptych_balancing_moves",
            "Hand-overs between ready workers, by reason: blocks (preemption), tokens (steps above the goal)",
            _by(load.num_balanced),
            ("reason",),
        )
        yield counter("diptych_stale_deltas", "Tokens received from abandoned workers", load.num_stale_deltas)
        yield counter(
            "diptych_role_changes",
            "Role changes of workers, by role: prefill, decode",
            load.role_changes.items(),
            ("from", "to"),
        )
        roles = Counter((worker.home, worker.role) for worker in load.workers)
        yield gauge("diptych_workers_by_role", "Workers, by initial and current role", roles.items(), ("home", "role"))
        yield from self._classes(load)
        yield from self._workers(load)

    def _classes(self, load: DispatchLoad) -> Iterator[Metric]:
        gauge, counter = self._families.gauge, self._families.counter
        in_flight = [((one.name,), one.num_in_flight) for one in load.classes]
        waiting = [((one.name,), one.num_waiting) for one in load.classes]
        oldest = [((one.name,), one.oldest_wait_s) for one in load.classes]
        limits = [((one.name,), one.wait_limit_s) for one in load.classes]
        refused = [((one.name,), one.num_refused) for one in load.classes]
        yield gauge("diptych_class_requests", "Sequences in the router, by class", in_flight, ("class",))
        yield gauge("diptych_class_waiting_requests", "Sequences without a worker, by class", waiting, ("class",))
        yield gauge("diptych_class_oldest_wait_seconds", "Longest current wait, by class", oldest, ("class",))
        yield gauge("diptych_class_wait_limit_seconds", "Maximum queueing time, by class", limits, ("class",))
        yield counter("diptych_class_refusals", "Requests rejected for missing their goal", refused, ("class",))
        yield counter("diptych_taken_back", "Prompts revoked from slow workers", load.num_taken_back)

    def _workers(self, load: DispatchLoad) -> Iterator[Metric]:
        gauge, counter = self._families.gauge, self._families.counter
        workers = [((worker.worker_id or worker.address, worker.role), worker) for worker in load.workers]
        states = [((*key, worker.state), 1.0) for key, worker in workers]
        requests = [(key, worker.num_booked_requests) for key, worker in workers]
        queued = [(key, worker.num_queued_tokens) for key, worker in workers]
        waits = [(key, worker.wait_s) for key, worker in workers]
        lags = {(worker.role,): worker.lag_s for worker in load.workers}
        errors = [(key, worker.step_model["error"]) for key, worker in workers if worker.step_model]
        blocks = [(key, worker.num_available_blocks) for key, worker in workers]
        known = [(key, worker.num_known_blocks) for key, worker in workers]
        cuts = [(key, worker.num_cuts) for key, worker in workers]
        unsent = [(key, worker.num_unsent) for key, worker in workers]
        dropped = [(key, worker.num_dropped_frames) for key, worker in workers]
        yield gauge(
            "diptych_worker_state",
            "1 for the current state of a worker: unknown, connected, ready, draining, dead, withheld",
            states,
            (*WORKER, "state"),
        )
        yield gauge("diptych_worker_requests", "Sequences of this router on a worker", requests, WORKER)
        yield gauge("diptych_worker_queued_tokens", "Prompt tokens queued on a worker", queued, WORKER)
        yield gauge("diptych_worker_wait_seconds", "Predicted wait of a new prompt on a worker", waits, WORKER)
        yield gauge(
            "diptych_first_token_lag_seconds", "Delay of first tokens over predictions", lags.items(), ("role",)
        )
        yield gauge("diptych_worker_model_error", "Relative error of a worker's step time model", errors, WORKER)
        yield gauge("diptych_worker_available_blocks", "Available KV blocks of a worker", blocks, WORKER)
        yield gauge("diptych_worker_known_blocks", "Cached KV blocks of a worker known to the router", known, WORKER)
        yield counter("diptych_worker_cuts", "Lost connections to a worker", cuts, WORKER)
        yield counter("diptych_worker_unsent", "Messages dropped because a send queue was full", unsent, WORKER)
        yield counter("diptych_worker_frames_dropped", "Invalid frames received from a worker", dropped, WORKER)


def _by(values: Mapping[str, float]) -> Samples:
    return (((label,), value) for label, value in values.items())


class PoolCollector(Collector):
    """Collector of the demand for workers and the attainment of goals."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        window: SLOWindow,
        labels: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dispatcher, self._window, self._families, self._clock = dispatcher, window, Families(labels), clock

    def collect(self) -> Iterable[Metric]:
        now = self._clock()
        fleet, window = self._dispatcher.fleet, self._window
        demand = self._dispatcher.demand(window.tpot_s)
        unpaired = {(role, ""): 0 for role in ROLES} | fleet.pairing.num_unpaired()
        attained = {(slo,): share for slo, share in window.attainment(now).items()}
        held = {(role,): num for role, num in demand.held.items()}
        backlog = {("prefill",): demand.backlog_s}
        pressure = {("prefill",): demand.prefill_pressure, ("decode",): demand.pressure}
        gauge = self._families.gauge
        yield gauge("diptych_requests_held", "Sequences for which a role has no worker", held.items(), ("role",))
        yield gauge("diptych_pool_backlog_seconds", "Queued prompts, in worker seconds", backlog.items(), ("role",))
        yield gauge("diptych_pool_pressure", "Number of workers that the load would fill", pressure.items(), ("role",))
        yield gauge(
            "diptych_pool_workers",
            "Workers, by state: unknown, connected, ready, draining, dead, withheld",
            demand.workers.items(),
            ("role", "state"),
        )
        # For endpoint pickers, which treat a router as the model server.
        yield gauge("vllm:num_requests_running", "Sequences in the workers' running batches", demand.num_running)
        yield gauge("vllm:num_requests_waiting", "Sequences queued in the router or at workers", demand.num_waiting)
        yield gauge("vllm:kv_cache_usage_perc", "Share of decode workers' blocks in use, 0 to 1", demand.kv_usage)
        yield gauge(
            "diptych_unpaired_workers", "Workers without a compatible one", unpaired.items(), ("role", "reason")
        )
        if attained:
            yield gauge(
                "diptych_slo_attainment_ratio",
                "Share of requests in the last minute that met a goal: ttft, tpot",
                attained.items(),
                ("slo",),
            )
            by_class = window.class_attainment(now).items()
            yield gauge(
                "diptych_class_attainment_ratio",
                "Share of requests in the last minute that met a goal, by class and goal: ttft, tpot",
                [((name, slo), share) for name, shares in by_class for slo, share in shares.items()],
                ("class", "slo"),
            )
        if fleet.source is not None:
            yield from discovery_families(fleet.source.status, self._families, now)


class DiscoveryCollector(Collector):
    """Collector of worker discovery for all models together."""

    def __init__(
        self, status: DiscoveryStatus, labels: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._status, self._families, self._clock = status, Families(labels), clock

    def collect(self) -> Iterable[Metric]:
        return discovery_families(self._status, self._families, self._clock())


def discovery_families(status: DiscoveryStatus, families: Families, now: float) -> Iterator[Metric]:
    """Yield the metrics of worker discovery."""
    gauge = families.gauge
    yield gauge(
        "diptych_discovery_endpoints",
        "Discovered workers, by state: serving, unready, terminating",
        status.counts().items(),
        ("role", "state"),
    )
    yield gauge("diptych_discovery_last_sync_age_seconds", "Time since the last full discovery", status.age_s(now))
    syncs = [((result,), count) for result, count in status.num_syncs.items()]
    yield families.counter("diptych_discovery_syncs", "Full discoveries, by result: ok, failed", syncs, ("result",))


class PlanCollector(Collector):
    """Collector of the latest plan. Yields nothing before the first plan.

    Omits the wanted size of a pool that must not shrink yet and does not grow either: the known workers may be fewer
    than the deployed ones, and autoscalers change nothing without the metric.
    """

    def __init__(self, outlook: Callable[[], Outlook | None], labels: Mapping[str, str]) -> None:
        self._outlook, self._families = outlook, Families(labels)

    def collect(self) -> Iterable[Metric]:
        if (outlook := self._outlook()) is None:
            return
        plan, gauge = outlook.plan, self._families.gauge
        pools = plan.pools.items()
        is_sure = not plan.growth_only
        grows = {role for role, pool in pools if pool.wanted > pool.present and not outlook.fleet.missing}
        wanted = [((str(role),), float(pool.wanted)) for role, pool in pools if is_sure or role in grows]
        needed = [((str(role),), float(pool.needed)) for role, pool in pools]
        starts = [((str(role),), start_s) for role, start_s in outlook.fleet.start_s.items()]
        yield gauge("diptych_pool_wanted_workers", "Planned number of workers", wanted, ("role",))
        yield gauge("diptych_pool_needed_workers", "Number of workers required by the load", needed, ("role",))
        yield gauge("diptych_pool_start_seconds", "Start time of a worker", starts, ("role",))
        yield gauge("diptych_offered_requests_per_second", "Request rate, including rejections", outlook.load.rate)
        yield gauge("diptych_plan_feasible", "1 if the plan meets the goals", float(not plan.unmet))
        yield gauge("diptych_plan_held", "1 if the plan is unchanged for lack of data", float(bool(plan.held)))
        tails = (("predicted", plan.predicted.ttft_s, plan.predicted.tpot_s), ("measured", *outlook.measured_s))
        samples = [
            ((kind, slo), tail_s)
            for kind, ttft_s, tpot_s in tails
            for slo, tail_s in (("ttft", ttft_s), ("tpot", tpot_s))
        ]
        yield gauge(
            "diptych_plan_tail_seconds",
            "TTFT and TPOT at the goals' quantile: predicted by the plan, measured in the last minute",
            samples,
            ("kind", "slo"),
        )
