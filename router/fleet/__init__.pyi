from router.fleet.adapters import AdapterInfo, FleetAdapters, Outcome
from router.fleet.booking import Booking
from router.fleet.census import ModelCensus
from router.fleet.discovery import DiscoveryStatus, Endpoint
from router.fleet.fleet import CONTROL_HWM, MAX_DISCOVERED, WorkerFleet
from router.fleet.prefix_index import PrefixHits, PrefixIndex
from router.fleet.registry import WorkerRegistry
from router.fleet.serving import SERVING_PROTOCOL
from router.fleet.worker import Worker, WorkerState, by_fingerprint
from router.fleet.worker_connection import WorkerConnection
from router.fleet.worker_monitor import FleetEvent

__all__ = [
    "AdapterInfo",
    "Booking",
    "CONTROL_HWM",
    "DiscoveryStatus",
    "Endpoint",
    "FleetAdapters",
    "FleetEvent",
    "MAX_DISCOVERED",
    "ModelCensus",
    "Outcome",
    "PrefixHits",
    "PrefixIndex",
    "SERVING_PROTOCOL",
    "Worker",
    "WorkerConnection",
    "WorkerFleet",
    "WorkerRegistry",
    "WorkerState",
    "by_fingerprint",
]
