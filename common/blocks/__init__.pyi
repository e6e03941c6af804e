from common.blocks.block_hash import DIGEST_BYTES, BlockHasher
from common.blocks.window import HOLE, CachedPrefix, Window

__all__ = [
    "BlockHasher",
    "CachedPrefix",
    "DIGEST_BYTES",
    "HOLE",
    "Window",
]
