"""How many examples Hypothesis draws: all of them, or a third under the profile "quick", which `make test` loads."""

from __future__ import annotations

from hypothesis import settings

FULL = 100


def register_profiles() -> None:
    """Before `--hypothesis-profile` is read."""
    settings.register_profile("full", max_examples=FULL)
    settings.register_profile("quick", max_examples=FULL // 3)
    settings.load_profile("full")


def examples(num: int) -> int:
    """The share of `num` that the profile of this run draws, at least 5."""
    return max(min(num, 5), num * settings().max_examples // FULL)
