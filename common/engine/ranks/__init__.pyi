"""A worker of several processes, on one host or several: their start and end, their messages, and their steps."""

from common.engine.ranks.loading import load_ranked

__all__ = [
    "load_ranked",
]
