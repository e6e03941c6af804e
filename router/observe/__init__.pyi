from router.observe.collectors import DiscoveryCollector, PlanCollector, PoolCollector
from router.observe.load_history import STEP_S, LoadHistory, Point, merged_history
from router.observe.measured_client import MeasuredClient
from router.observe.metrics import ENGINE, RouterMetrics
from router.observe.recent_traffic import Traffic, percentiles_of
from router.observe.request_record import ChoiceRecord, RequestRecord
from router.observe.slo import SLOWindow

__all__ = [
    "ChoiceRecord",
    "DiscoveryCollector",
    "ENGINE",
    "LoadHistory",
    "MeasuredClient",
    "PlanCollector",
    "Point",
    "PoolCollector",
    "RequestRecord",
    "RouterMetrics",
    "SLOWindow",
    "STEP_S",
    "Traffic",
    "merged_history",
    "percentiles_of",
]
