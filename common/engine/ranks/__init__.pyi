from common.engine.ranks.loading import load_ranked

__all__ = [
    "load_ranked",
]
