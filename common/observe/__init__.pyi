"""Logs; averages, windows and quantiles of recent observations."""

from common.observe.buckets import SECONDS, SHORT_SECONDS
from common.observe.draft_metrics import DraftMetrics
from common.observe.ewma import Ewma
from common.observe.families import Families, Samples
from common.observe.logging import REMIND_S, setup_logging
from common.observe.progress import ByteProgress, in_bytes
from common.observe.recent_quantile import RecentQuantile, quantiles_of
from common.observe.sliding_window import SlidingWindow

__all__ = [
    "ByteProgress",
    "DraftMetrics",
    "Ewma",
    "Families",
    "REMIND_S",
    "RecentQuantile",
    "SECONDS",
    "SHORT_SECONDS",
    "Samples",
    "SlidingWindow",
    "in_bytes",
    "quantiles_of",
    "setup_logging",
]
