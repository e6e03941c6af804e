"""Frequency of cyclic garbage collection in a router. Reference counting frees all other garbage immediately."""

from __future__ import annotations

import gc

THRESHOLDS = (20_000, 20, 20)
"""With Python's default of 700 new objects, a collection runs every few routing decisions, and a full collection, over
the reported state of a thousand workers, every few thousand."""


def collect_seldom() -> None:
    """Collect less often. Existing objects live as long as the process, so later collections skip them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
