"""What callers and all backends agree on: the operations, and the data that they take."""

from __future__ import annotations

from kernels.interface.attention_plan import AttentionPlan, KVLayout, QuerySpan
from kernels.interface.draws import Draw, SamplingTensors
from kernels.interface.held_weight import HeldWeight
from kernels.interface.host_copies import fill_device, to_device
from kernels.interface.kernels import UNSCALED, AttentionRule, HeadNorms, HeldProducts, KVScales, LatentNorm
from kernels.interface.kv_region import (
    LARGEST_FP8,
    LEAST_SCALE,
    head_dim_of,
    numbers_of,
    packed,
    quantised,
    row_width,
    saturated,
    scales_of,
    unpacked,
)
from kernels.interface.lora import GroupedRows, LoraStack
from kernels.interface.pinned_memory import pinned
from kernels.interface.pinned_ring import PIECE_ALIGN_BYTES
from kernels.interface.quantised_weight import QuantisedWeight
from kernels.interface.routing import Routing
from kernels.interface.seats import (
    ADAPTER,
    BEFORE,
    NUM_NARROW,
    NUM_WIDE,
    POSITION,
    RUN_ADAPTER,
    RUN_POSITION,
    RUN_SLOT,
    RUN_TOKEN,
    TABLE,
    TOKEN,
    TOP_K,
    TOP_P,
    SeatLayout,
    StepRows,
)

__all__ = [
    "ADAPTER",
    "AttentionPlan",
    "AttentionRule",
    "BEFORE",
    "Draw",
    "GroupedRows",
    "HeadNorms",
    "HeldProducts",
    "HeldWeight",
    "KVLayout",
    "KVScales",
    "LARGEST_FP8",
    "LEAST_SCALE",
    "LatentNorm",
    "LoraStack",
    "NUM_NARROW",
    "NUM_WIDE",
    "PIECE_ALIGN_BYTES",
    "POSITION",
    "QuantisedWeight",
    "QuerySpan",
    "RUN_ADAPTER",
    "RUN_POSITION",
    "RUN_SLOT",
    "RUN_TOKEN",
    "Routing",
    "SamplingTensors",
    "SeatLayout",
    "StepRows",
    "TABLE",
    "TOKEN",
    "TOP_K",
    "TOP_P",
    "UNSCALED",
    "fill_device",
    "head_dim_of",
    "numbers_of",
    "packed",
    "pinned",
    "quantised",
    "row_width",
    "saturated",
    "scales_of",
    "to_device",
    "unpacked",
]
