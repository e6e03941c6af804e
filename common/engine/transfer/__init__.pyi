from common.engine.transfer.connection import KVConnection
from common.engine.transfer.frames import blocks_in_queues, blocks_per_message
from common.engine.transfer.incoming import IncomingTransfers, Recipient, TransferEndpoints
from common.engine.transfer.lender import KVLender, LendableBlocks, LenderIdentity
from common.engine.transfer.mailbox import Mailbox
from common.engine.transfer.puller import KVPuller, PeerCaches
from common.engine.transfer.receiver import (
    IncomingTransfer,
    KVListener,
    KVReceiver,
    TransferCompleted,
    TransferFailed,
    TransferOpened,
)
from common.engine.transfer.sender import KVSender, TransferAdvanced, TransferEnded
from common.engine.transfer.transports import Frames, SenderMemory, Transport, new_transport

__all__ = [
    "Frames",
    "IncomingTransfer",
    "IncomingTransfers",
    "KVConnection",
    "KVLender",
    "KVListener",
    "KVPuller",
    "KVReceiver",
    "KVSender",
    "LendableBlocks",
    "LenderIdentity",
    "Mailbox",
    "PeerCaches",
    "Recipient",
    "SenderMemory",
    "TransferAdvanced",
    "TransferCompleted",
    "TransferEnded",
    "TransferEndpoints",
    "TransferFailed",
    "TransferOpened",
    "Transport",
    "blocks_in_queues",
    "blocks_per_message",
    "new_transport",
]
