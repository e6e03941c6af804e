from router.observe.collectors import DiscoveryCollector, PlanCollector, PoolCollector
from router.observe.measured_client import MeasuredClient
from router.observe.metrics import ENGINE, RouterMetrics
from router.observe.recent_traffic import Traffic, percentiles_of
from router.observe.request_record import ChoiceRecord, RequestRecord
from router.observe.slo import SLOWindow

__all__ = [
    "ChoiceRecord",
    "DiscoveryCollector",
    "ENGINE",
    "MeasuredClient",
    "PlanCollector",
    "PoolCollector",
    "RequestRecord",
    "RouterMetrics",
    "SLOWindow",
    "Traffic",
    "percentiles_of",
]
