from common.engine.kv.tiers.block_read import BlockRead
from common.engine.kv.tiers.block_tiers import BlockTiers, ReadEnded
from common.engine.kv.tiers.copies import copied_incoming
from common.engine.kv.tiers.counts import TierCounts
from common.engine.kv.tiers.factory import open_tiers

__all__ = [
    "BlockRead",
    "BlockTiers",
    "ReadEnded",
    "TierCounts",
    "copied_incoming",
    "open_tiers",
]
