"""Every message that crosses a process border: one closed union, in a file each for routers, workers and KV transfers.

Other modules import messages from here. `codec.py` packs them.
"""

from __future__ import annotations

from common.wire.kv_messages import (
    MAX_BLOCKS_PER_FRAME,
    NONCE_BYTES,
    KVAck,
    KVBlocks,
    KVDone,
    KVFailed,
    KVGrant,
    KVMemory,
    KVOpen,
    KVWait,
    ToDecode,
    ToPrefill,
)
from common.wire.message_fields import PROTOCOL_VERSION, Message
from common.wire.router_messages import (
    AbortRequest,
    BlockSnapshotRequest,
    ChangeRole,
    DecodeRequest,
    HandOver,
    KVTarget,
    PrefillRequest,
    ResetPrefixCache,
    RouterHeartbeat,
    RouterHello,
    ToWorker,
)
from common.wire.worker_messages import (
    MAX_OUTPUTS,
    MAX_SHORT_HASHES,
    SHORT_HASH_BYTES,
    BlockEvents,
    BlockSnapshot,
    PromptLogprobs,
    RequestFailed,
    ShortHashes,
    Timeline,
    TokenDelta,
    TokenOutput,
    ToRouter,
    WorkerHeartbeat,
    WorkerHello,
)

__all__ = [
    "AbortRequest",
    "AnyMessage",
    "BlockEvents",
    "BlockSnapshot",
    "BlockSnapshotRequest",
    "ChangeRole",
    "DecodeRequest",
    "HandOver",
    "KVAck",
    "KVBlocks",
    "KVDone",
    "KVFailed",
    "KVGrant",
    "KVMemory",
    "KVOpen",
    "KVTarget",
    "KVWait",
    "MAX_BLOCKS_PER_FRAME",
    "MAX_OUTPUTS",
    "MAX_SHORT_HASHES",
    "Message",
    "NONCE_BYTES",
    "PROTOCOL_VERSION",
    "PrefillRequest",
    "PromptLogprobs",
    "RequestFailed",
    "ResetPrefixCache",
    "RouterHeartbeat",
    "RouterHello",
    "SHORT_HASH_BYTES",
    "ShortHashes",
    "Timeline",
    "ToDecode",
    "ToPrefill",
    "ToRouter",
    "ToWorker",
    "TokenDelta",
    "TokenOutput",
    "WorkerHeartbeat",
    "WorkerHello",
]

AnyMessage = ToWorker | ToRouter | ToDecode | ToPrefill
