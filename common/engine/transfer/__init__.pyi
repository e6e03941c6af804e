"""Both ends of a KV transfer: sender and receiver, and lender and puller of cached blocks."""

from common.engine.transfer.frames import blocks_in_queues, blocks_per_message
from common.engine.transfer.incoming import (
    IncomingTransfer,
    SenderMemory,
    TransferCompleted,
    TransferFailed,
    TransferOpened,
)
from common.engine.transfer.lendable import Lendable
from common.engine.transfer.lender import KVLender, LenderIdentity
from common.engine.transfer.nixl_agent import NixlAgent, NixlError
from common.engine.transfer.outgoing import TransferAdvanced, TransferEnded
from common.engine.transfer.peer_caches import PeerCaches
from common.engine.transfer.puller import KVPuller
from common.engine.transfer.receiver import KVReceiver
from common.engine.transfer.remote_memory import OfferedMemory
from common.engine.transfer.remote_reads import RemoteReads
from common.engine.transfer.sender import KVSender
from common.engine.transfer.shipping import Shipping

__all__ = [
    "IncomingTransfer",
    "KVLender",
    "KVPuller",
    "KVReceiver",
    "KVSender",
    "Lendable",
    "LenderIdentity",
    "NixlAgent",
    "NixlError",
    "OfferedMemory",
    "PeerCaches",
    "RemoteReads",
    "SenderMemory",
    "Shipping",
    "TransferAdvanced",
    "TransferCompleted",
    "TransferEnded",
    "TransferFailed",
    "TransferOpened",
    "blocks_in_queues",
    "blocks_per_message",
]
