from common.observe.averages import Ewma, RecentQuantile, RecentRate, SlidingWindow, quantiles_of
from common.observe.logging import REMIND_S, recent_warnings, setup_logging
from common.observe.metrics import SECONDS, SHORT_SECONDS, DraftMetrics, Families, Samples
from common.observe.progress import ByteProgress, in_bytes
from common.observe.shared_text import SharedText

__all__ = [
    "ByteProgress",
    "DraftMetrics",
    "Ewma",
    "Families",
    "REMIND_S",
    "RecentQuantile",
    "RecentRate",
    "SECONDS",
    "SHORT_SECONDS",
    "Samples",
    "SharedText",
    "SlidingWindow",
    "in_bytes",
    "quantiles_of",
    "recent_warnings",
    "setup_logging",
]
