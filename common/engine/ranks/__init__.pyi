from common.engine.ranks.channel import RANK_END_S, Channel
from common.engine.ranks.loading import load_ranked

__all__ = [
    "Channel",
    "RANK_END_S",
    "load_ranked",
]
