from common.engine.kv.block_log import BlockLog
from common.engine.kv.block_pool import BlockCounts, BlockPool
from common.engine.kv.block_ring import BlockRing, ring_for
from common.engine.kv.cache import SMALL_DTYPES, KVCache, block_bytes, torch_dtype
from common.engine.kv.checksums import checksum
from common.engine.kv.copy_stream import CopyStream
from common.engine.kv.cuda_driver import DescriptorError, DriverError, driver
from common.engine.kv.device_memory import ExportedMemory, KVDevice, map_exported
from common.engine.kv.quantised_staging import quantised_incoming, quantised_outgoing
from common.engine.kv.sharded_cache import ShardedCache
from common.engine.kv.shared_memory import KVMemory, SharedMemoryError, map_shared
from common.engine.kv.staging import (
    BlocksInPlace,
    GatheredOutgoing,
    IncomingBlocks,
    LentBuffers,
    OutgoingBlocks,
    RingSource,
    StagedIncoming,
    StagedOutgoing,
    incoming_blocks,
    outgoing_blocks,
)
from common.engine.kv.window_usage import in_words

__all__ = [
    "BlockCounts",
    "BlockLog",
    "BlockPool",
    "BlockRing",
    "BlocksInPlace",
    "CopyStream",
    "DriverError",
    "ExportedMemory",
    "GatheredOutgoing",
    "IncomingBlocks",
    "KVCache",
    "KVDevice",
    "KVMemory",
    "LentBuffers",
    "DescriptorError",
    "SharedMemoryError",
    "OutgoingBlocks",
    "RingSource",
    "SMALL_DTYPES",
    "ShardedCache",
    "StagedIncoming",
    "StagedOutgoing",
    "block_bytes",
    "checksum",
    "driver",
    "in_words",
    "incoming_blocks",
    "map_exported",
    "map_shared",
    "outgoing_blocks",
    "quantised_incoming",
    "quantised_outgoing",
    "ring_for",
    "torch_dtype",
]
