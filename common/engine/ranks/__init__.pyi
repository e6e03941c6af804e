from common.engine.ranks.admission import key_of
from common.engine.ranks.channel import Channel
from common.engine.ranks.connection import interface_to, normalized_address
from common.engine.ranks.loading import load_ranked
from common.engine.ranks.rank_hosts import JoinedHost, wait_for_hosts

__all__ = [
    "Channel",
    "JoinedHost",
    "interface_to",
    "key_of",
    "load_ranked",
    "normalized_address",
    "wait_for_hosts",
]
