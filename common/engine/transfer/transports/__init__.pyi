from common.engine.transfer.transports.interface import SenderMemory, Transport
from common.engine.transfer.transports.registry import new_transport
from common.engine.transfer.transports.tcp import Frames

__all__ = [
    "Frames",
    "SenderMemory",
    "Transport",
    "new_transport",
]
