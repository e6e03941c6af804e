"""Attention as models use it, compiled for chips that need not be there: what the assembler made of it.

Keys and values are converted before they are multiplied, a float8 cache's too, so its products are those of bfloat16.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from common.config.worker import BLOCK_SIZES
from kernels.gpu.decode_attention import REDUCE_CHUNK, DecodeConfig, decode_config
from kernels.gpu.prefill_attention import prefill_config
from kernels.gpu.work_list import MAX_SPLITS, SPLIT_TOKENS

from .compiled import CHIPS, MULTIPROCESSOR_REGISTERS, Compiled, Job, Target, compile_kernels

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(600), pytest.mark.slow]
PACKAGE = "kernels.gpu"
POINTERS = {
    **{"q": "*bf16", "out": "*bf16", "sinks": "*fp32", "partial": "*fp32", "lse": "*fp32"},
    **dict.fromkeys(("block_tables", "spans", "items", "total", "splits", "tiles"), "*i32"),
}
INTEGERS = ("layer", "table_width", "window", "num_spans", "stride_q_row", "stride_q_head")
NUMBERS = ("scale", "softcap", "v_scale")
SIGNATURE = {**POINTERS, **dict.fromkeys(INTEGERS, "i32"), **dict.fromkeys(NUMBERS, "fp32")}
ALIGNED = ("stride_q_row", "stride_q_head")


@dataclass(frozen=True)
class Shape:
    """Of a model's attention; features: those of window, softcap and sinks that it uses."""

    layers: int
    kv_heads: int
    group: int
    head_dim: int
    cache: str = "bf16"
    features: str = ""
    block_size: int = 64

    def constexprs(self) -> dict[str, Any]:
        return {
            "NUM_LAYERS": self.layers,
            "NUM_KV_HEADS": self.kv_heads,
            "GROUP": self.group,
            "BLOCK_SIZE": self.block_size,
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": 1 << (self.head_dim - 1).bit_length(),
            "WINDOW": "window" in self.features,
            "SOFTCAP": "softcap" in self.features,
            "SINKS": "sinks" in self.features,
            "FP8_BITS": self.cache == "u8",
            **({} if "sinks" in self.features else {"sinks": None}),
        }

    def job(self, kernel: str, capability: Target, warps: int, **constexprs: Any) -> Job:
        signature = {**SIGNATURE, "kv": f"*{self.cache}"}
        known = self.constexprs() | constexprs
        return Job(f"{PACKAGE}.{kernel}", signature, known, capability, warps, aligned=ALIGNED)


LLAMA = Shape(32, 8, 4, 128)
LLAMA_FLOAT8 = Shape(32, 8, 4, 128, cache="fp8e4nv")
LLAMA_FLOAT8_BITS = Shape(32, 8, 4, 128, cache="u8")
SMOLLM2 = Shape(30, 3, 3, 64)
MISTRAL = Shape(32, 8, 4, 128, features="window")
PHI3 = Shape(32, 32, 1, 96)
GPT_OSS = Shape(36, 8, 8, 64, features="window sinks")
GEMMA3 = Shape(26, 1, 4, 256, features="window")
DECODE = [
    (LLAMA, 80), (LLAMA, 90), (LLAMA_FLOAT8, 90), (LLAMA_FLOAT8_BITS, 80), (SMOLLM2, 90), (GPT_OSS, 90), (GEMMA3, 90),
    (MISTRAL, 90), (PHI3, 90),
]  # fmt: skip
PREFILL = [(LLAMA, 80), (LLAMA, 90), (LLAMA_FLOAT8, 90), (SMOLLM2, 90), (GEMMA3, 90)]
OTHER_BLOCKS = [replace(LLAMA, block_size=size) for size in BLOCK_SIZES if size != LLAMA.block_size]
"""A tile of keys then lies in several blocks, or is part of one."""
SPLIT = [*PREFILL, (GPT_OSS, 90), (PHI3, 90)]
DECODE += [(shape, 90) for shape in OTHER_BLOCKS]
PREFILL += [(shape, 90) for shape in OTHER_BLOCKS]
SPLIT += [(shape, 90) for shape in OTHER_BLOCKS]


def decode_config_of(shape: Shape, capability: Target, dtype: torch.dtype = torch.bfloat16) -> DecodeConfig:
    known = shape.constexprs()
    masked = known["WINDOW"] or known["BLOCK_D"] != shape.head_dim
    element_bytes = 1 if "8" in shape.cache else dtype.itemsize
    return decode_config(shape.head_dim, dtype, element_bytes, CHIPS[capability], masked)


def decode_job(shape: Shape, capability: Target, dtype: torch.dtype = torch.bfloat16) -> Job:
    config = decode_config_of(shape, capability, dtype)
    tiles = {"BLOCK_G": 16, "BLOCK_N": config.tile, "STAGES": config.stages}
    return shape.job("decode_attention:attend_splits", capability, config.warps, **tiles)


def prefill_job(shape: Shape, capability: Target, dtype: torch.dtype = torch.bfloat16, *, split: bool = False) -> Job:
    config = prefill_config(shape.head_dim, dtype, CHIPS[capability])
    tiles = {"BLOCK_M": config.rows, "BLOCK_N": config.tile, "STAGES": config.stages, "boxes": None, "SPLIT": split}
    tiles |= {} if split else {"partial": None, "lse": None}
    return shape.job("prefill_attention:attend_query_tiles", capability, config.warps, **tiles)


def in_float32(job: Job) -> Job:
    """Queries, cache and output of it."""
    return replace(job, signature={**job.signature, **dict.fromkeys(("q", "kv", "out"), "*fp32")})


REDUCE = Job(
    f"{PACKAGE}.decode_attention:reduce_splits",
    SIGNATURE,
    {"NUM_HEADS": 32, "HEAD_DIM": 128, "BLOCK_D": 128, "CHUNK": REDUCE_CHUNK, "SINKS": False, "sinks": None},
    num_warps=2,
)
LIST = Job(
    f"{PACKAGE}.work_list:list_splits", SIGNATURE, {"SPLIT": SPLIT_TOKENS, "MAX_SPLITS": MAX_SPLITS, "BLOCK": 256}
)


JOBS: dict[Any, Job] = {
    **{("decode", *case): decode_job(*case) for case in DECODE},
    **{("prefill", *case): prefill_job(*case) for case in PREFILL},
    **{("split", *case): prefill_job(*case, split=True) for case in SPLIT},
    "reduce": REDUCE,
    "list": LIST,
    ("decode", "float32"): in_float32(decode_job(SMOLLM2, 90, torch.float32)),
    ("prefill", "float32"): in_float32(prefill_job(SMOLLM2, 90, torch.float32)),
    ("split", "float32"): in_float32(prefill_job(SMOLLM2, 90, torch.float32, split=True)),
}
FIRST = [("prefill", SMOLLM2, 90), "reduce", "list"]
"""What `make test` needs. All others are compiled together, because two processes share the work."""


class CompiledKernels(dict[Any, Compiled]):
    def __missing__(self, name: Any) -> Compiled:
        batch = FIRST if name in FIRST else [other for other in JOBS if other not in FIRST]
        self.update(zip(batch, compile_kernels([JOBS[each] for each in batch]), strict=True))
        return self[name]


@pytest.fixture(scope="module")
def compiled() -> dict[Any, Compiled]:
    return CompiledKernels()


@pytest.mark.parametrize(("shape", "capability"), DECODE)
def test_decode_attention_fits_as_often_as_it_is_started(
    compiled: dict[Any, Compiled], shape: Shape, capability: Target
) -> None:
    found = compiled["decode", shape, capability]
    config = decode_config_of(shape, capability)
    assert found.spills == 0
    registers = -(-found.registers // 8) * 8 * 32 * config.warps
    assert registers * config.programs <= MULTIPROCESSOR_REGISTERS
    assert (found.shared_bytes + 1024) * config.programs <= CHIPS[capability].shared_bytes + 1024
    assert "HMMA" in found.sass
    assert re.search(r"LDGSTS\.E\S*\.128", found.sass), "keys and values are not copied 16 bytes at a time"


@pytest.mark.parametrize(
    ("kernel", "shape", "capability"),
    [*(("prefill", *case) for case in PREFILL), *(("split", *case) for case in SPLIT)],
)
def test_prefill_attention_multiplies_on_tensor_cores(
    compiled: dict[Any, Compiled], kernel: str, shape: Shape, capability: Target
) -> None:
    """Whole tiles, and splits of their keys."""
    found = compiled[kernel, shape, capability]
    assert found.spills == 0
    assert found.shared_bytes <= CHIPS[capability].shared_bytes
    assert ("HGMMA" if capability >= 90 else "HMMA") in found.sass


@pytest.mark.parametrize("kernel", ["decode", "prefill", "split"])
def test_float32_is_multiplied_as_such(compiled: dict[Any, Compiled], kernel: str) -> None:
    """Tensor cores would take it as TF32, whose products have 11 bits."""
    found = compiled[kernel, "float32"]
    assert "FFMA" in found.sass and not re.search(r"\bHG?MMA", found.sass)
    assert found.spills == 0


@pytest.mark.parametrize("kernel", ["reduce", "list"])
def test_the_small_kernels_need_little(compiled: dict[Any, Compiled], kernel: str) -> None:
    found = compiled[kernel]
    assert found.spills == 0 and found.registers <= 64 and found.shared_bytes <= 2048


@pytest.mark.parametrize("kernel", [("decode", LLAMA, 90), ("prefill", SMOLLM2, 90), ("decode", SMOLLM2, 90)])
def test_blocks_are_addressed_with_64_bits(compiled: dict[Any, Compiled], kernel: tuple[str, Shape, int]) -> None:
    shape = kernel[1]
    stride = shape.layers * shape.kv_heads * 64 * 2 * shape.head_dim
    products = re.findall(rf"arith\.muli %\S+, %c{stride}_(i\d+)", compiled[kernel].ttir)
    assert products and set(products) == {"i64"}
