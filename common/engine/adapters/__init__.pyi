from common.engine.adapters.bank import AdapterBank, HeldAdapter
from common.engine.adapters.peft_file import AdapterWeights
from common.engine.adapters.shard import shard_of
from common.engine.adapters.slots import AdaptedModel, AdapterSlots

__all__ = [
    "AdaptedModel",
    "AdapterBank",
    "AdapterSlots",
    "AdapterWeights",
    "HeldAdapter",
    "shard_of",
]
