"""Names of KV blocks, and the windows through which a model looks back at them. Pure; the router uses both."""

from common.blocks.block_hash import DIGEST_BYTES, BlockHasher
from common.blocks.window import HOLE, CachedPrefix, Window

__all__ = [
    "BlockHasher",
    "CachedPrefix",
    "DIGEST_BYTES",
    "HOLE",
    "Window",
]
