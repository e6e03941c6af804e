"""The router's metrics of its plan for the pools, which autoscalers and operators read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from common.observe import Families
from router.planner import Outlook


class PlanCollector(Collector):
    """Shows the latest look of the planner; nothing before the first."""

    def __init__(self, outlook: Callable[[], Outlook | None], labels: Mapping[str, str]) -> None:
        self._outlook, self._families = outlook, Families(labels)

    def collect(self) -> Iterable[Metric]:
        if (outlook := self._outlook()) is None:
            return
        plan, gauge = outlook.plan, self._families.gauge
        pools = plan.pools.items()
        wanted = [((str(role),), float(pool.wanted)) for role, pool in pools]
        needed = [((str(role),), float(pool.needed)) for role, pool in pools]
        starts = [((str(role),), outlook.fleet.start_s.get(role, 0.0)) for role, _ in pools]
        yield gauge("diptych_pool_wanted_workers", "Workers that the plan wants", wanted, ("role",))
        yield gauge("diptych_pool_needed_workers", "Workers that the load needs, without bounds", needed, ("role",))
        yield gauge("diptych_pool_start_seconds", "How long a worker takes to start", starts, ("role",))
        yield gauge("diptych_offered_requests_per_second", "Requests, refused included", outlook.load.rate)
        yield gauge("diptych_plan_feasible", "1 while the goals can be met", float(not plan.unmet))
        yield gauge("diptych_plan_held", "1 while the plan holds still for lack of data", float(bool(plan.held)))
        tails = (("predicted", plan.predicted.ttft_s, plan.predicted.tpot_s), ("measured", *outlook.measured_s))
        samples = [
            ((kind, slo), tail_s)
            for kind, ttft_s, tpot_s in tails
            for slo, tail_s in (("ttft", ttft_s), ("tpot", tpot_s))
        ]
        yield gauge("diptych_plan_tail_seconds", "TTFT and TPOT at the quantile of the goals", samples, ("kind", "slo"))
