"""How many examples Hypothesis draws: all of them, or a tenth under the profile "quick", which `make test` loads.

Those of "quick" are the same in every run. Others are drawn by `make test-all`.
"""

from __future__ import annotations

from hypothesis import settings

FULL = 100


def register_profiles() -> None:
    """Before `--hypothesis-profile` is read. No example has a deadline: other tests take the cores."""
    settings.register_profile("full", max_examples=FULL, deadline=None)
    settings.register_profile("quick", max_examples=FULL // 10, deadline=None, derandomize=True)
    settings.load_profile("full")


def examples(num: int) -> int:
    """The share of `num` that the profile of this run draws, at least 5."""
    return max(min(num, 5), num * settings().max_examples // FULL)
