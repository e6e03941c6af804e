"""KV transports: one file each, behind the interface of `interface.py`, registered in `registry.py`."""

from common.engine.transfer.transports.interface import (
    IncomingEnd,
    OutgoingEnd,
    Parcel,
    ReadableMemory,
    SenderMemory,
    Transport,
)
from common.engine.transfer.transports.registry import TRANSPORTS, new_transport
from common.engine.transfer.transports.tcp import Frames

__all__ = [
    "Frames",
    "IncomingEnd",
    "OutgoingEnd",
    "Parcel",
    "ReadableMemory",
    "SenderMemory",
    "TRANSPORTS",
    "Transport",
    "new_transport",
]
