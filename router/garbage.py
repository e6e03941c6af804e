"""How often a router looks for garbage that refers to itself. All other garbage is freed at once."""

from __future__ import annotations

import gc

THRESHOLDS = (20_000, 20, 20)
"""Python's default of 700 new objects between two looks puts one into every few decisions, and one at all that a
thousand workers have told into every few thousand."""


def collect_seldom() -> None:
    """From now on: what is there already lives as long as the process, so later looks skip it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
