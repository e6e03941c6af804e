"""Metrics of the dispatcher's load: requests by stage, counters of its decisions, the state of each worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from common.observe import Families, Samples
from router.dispatch import DispatchLoad

WORKER = ("worker", "role")


class LoadCollector(Collector):
    """Reads the dispatcher's load at scrape time."""

    def __init__(self, load: Callable[[], DispatchLoad], labels: Mapping[str, str]) -> None:
        self._load, self._families = load, Families(labels)

    def collect(self) -> Iterable[Metric]:
        load, gauge, counter = self._load(), self._families.gauge, self._families.counter
        takeovers = load.num_retries.get("decode", 0)
        yield gauge("diptych_requests_in_flight", "Sequences in the router, by stage", _by(load.stages), ("stage",))
        yield gauge("diptych_wait_limit_seconds", "How long a new request may be bound to wait", load.wait_limit_s)
        yield counter("diptych_retries", "Moves to another worker, by role", _by(load.num_retries), ("role",))
        yield counter("diptych_takeovers", "Answers that another decode worker went on with", takeovers)
        yield counter("diptych_failures", "Sequences given up, by error class", _by(load.num_failures), ("reason",))
        yield counter("diptych_placements", "Sequences placed, by kind of place", _by(load.num_choices), ("kind",))
        yield counter(
            "diptych_routing_policy_errors",
            "Decisions that --routing-policy failed to make and the built-in policy made",
            load.num_policy_errors,
        )
        yield counter(
            "diptych_handovers", "Running answers handed over between workers", _by(load.num_handovers), ("outcome",)
        )
        yield counter(
            "diptych_balancing_moves", "Hand-overs between ready workers", _by(load.num_balanced), ("reason",)
        )
        yield counter("diptych_stale_deltas", "Tokens that came from a worker given up", load.num_stale_deltas)
        yield counter(
            "diptych_role_changes", "Workers that changed their role", load.role_changes.items(), ("from", "to")
        )
        roles = Counter((worker.home, worker.role) for worker in load.workers)
        yield gauge("diptych_workers_by_role", "Workers, by first and present role", roles.items(), ("home", "role"))
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
        yield gauge("diptych_class_waiting_requests", "Those of them on no worker", waiting, ("class",))
        yield gauge("diptych_class_oldest_wait_seconds", "How long the oldest of these waits", oldest, ("class",))
        yield gauge("diptych_class_wait_limit_seconds", "How long a new one may be bound to wait", limits, ("class",))
        yield counter("diptych_class_refusals", "Refused for a goal that they would miss", refused, ("class",))
        yield counter("diptych_taken_back", "Prompts taken back from slow workers", load.num_taken_back)

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
        yield gauge("diptych_worker_state", "1 for the state a worker is in", states, (*WORKER, "state"))
        yield gauge("diptych_worker_requests", "Sequences this router has on a worker", requests, WORKER)
        yield gauge("diptych_worker_queued_tokens", "Prompt tokens waiting on a worker", queued, WORKER)
        yield gauge("diptych_worker_wait_seconds", "How long a new prompt would wait there", waits, WORKER)
        yield gauge("diptych_first_token_lag_seconds", "First tokens behind what models say", lags.items(), ("role",))
        yield gauge("diptych_worker_model_error", "Error of its model of steps, 0.1: a tenth", errors, WORKER)
        yield gauge("diptych_worker_available_blocks", "KV blocks a worker could give", blocks, WORKER)
        yield gauge("diptych_worker_known_blocks", "KV blocks a worker caches, as this router knows", known, WORKER)
        yield counter("diptych_worker_cuts", "Times the connection to a worker was lost", cuts, WORKER)
        yield counter("diptych_worker_unsent", "Messages a full queue had no room for", unsent, WORKER)
        yield counter("diptych_worker_frames_dropped", "Frames that were no valid message", dropped, WORKER)


def _by(values: Mapping[str, float]) -> Samples:
    return (((label,), value) for label, value in values.items())
