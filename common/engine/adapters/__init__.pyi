from common.engine.adapters.bank import AdapterBank, HeldAdapter
from common.engine.adapters.peft_file import AdapterWeights
from common.engine.adapters.places import AdaptedModel, AdapterPlaces
from common.engine.adapters.shard import shard_of

__all__ = [
    "AdaptedModel",
    "AdapterBank",
    "AdapterPlaces",
    "AdapterWeights",
    "HeldAdapter",
    "shard_of",
]
