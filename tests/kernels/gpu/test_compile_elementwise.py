"""Ahead of time, for chips that are not there: nothing spills, and what is bound by memory moves 16 bytes a thread."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from common.config.worker import BLOCK_SIZES
from kernels.gpu import blocks, norm, rotary, sampling, seats
from kernels.gpu.tiles import activation

from .compiled import Compiled, Job, compile_kernels

pytestmark = [pytest.mark.interpret, pytest.mark.slow]


def norm_job(width: int, add: bool) -> Job:
    rows, block, warps = norm.norm_tile(width)
    signature = {"x": "*bf16", "delta": "*bf16", "total": "*bf16", "weight": "*fp32", "out": "*bf16"}
    numbers = {"num_rows": "i32", "width": "i32", "stride_x": "i32", "stride_delta": "i32", "eps": "fp32"}
    constants = {"BLOCK_ROWS": rows, "BLOCK": block, "ADD": add}
    if not add:
        constants |= {"delta": None, "total": None}
    aligned = ("width", "stride_x", "stride_delta")
    return Job("kernels.gpu.norm:norm_rows", signature | numbers, constants, 90, warps, 3, aligned)


def rotary_job(heads: int, kv_heads: int, dim: int, normed: int, fp8: bool, block_size: int = 64) -> Job:
    half, block_heads, warps = rotary.rotary_tile(heads, dim)
    signature = {"qkv": "*bf16", "cos": "*fp32", "sin": "*fp32", "q": "*bf16", "kv": "*u8" if fp8 else "*bf16"}
    signature |= {"slots": "*i64", "q_norm": "*fp32", "k_norm": "*fp32", "layer": "i32", "num_layers": "i32"}
    signature |= {"stride_qkv": "i32", "eps": "fp32", "k_scale": "fp32", "v_scale": "fp32"}
    constants = {"NUM_HEADS": heads, "NUM_KV_HEADS": kv_heads, "HEAD_DIM": dim, "BLOCK_SIZE": block_size}
    constants |= {"BLOCK_HALF": half, "BLOCK_HEADS": block_heads, "NORM": normed, "FP8": fp8}
    if not normed:
        constants |= {"q_norm": None, "k_norm": None}
    return Job("kernels.gpu.rotary:rotate_tokens", signature, constants, 90, warps, 3, ("stride_qkv",))


def gated_job(gate: int) -> Job:
    signature = {"gate_up": "*bf16", "out": "*bf16", "width": "i32", "stride_row": "i32"}
    constants = {"GATE": gate, "BLOCK": activation.BLOCK}
    return Job("kernels.gpu.tiles.activation:gate_rows", signature, constants, aligned=("width", "stride_row"))


def copy_job(to_buffer: bool) -> Job:
    signature = {"kv": "*i32", "buffer": "*i32", "block_ids": "*i64", "num_words": "i32"}
    constants = {"TO_BUFFER": to_buffer, "BLOCK": blocks.WORDS}
    return Job("kernels.gpu.blocks:copy_words", signature, constants, aligned=("num_words",))


def sums_job() -> Job:
    signature = {"kv": "*i64", "sums": "*i64", "block_ids": "*i64", "num_words": "i32"}
    return Job("kernels.gpu.blocks:mix_words", signature, {"BLOCK": blocks.WORDS}, aligned=("num_words",))


def quantised_job(name: str, block_size: int = 64) -> Job:
    slots, width = blocks.quantised_tile(block_size, 128)
    signature = {"kv": "*bf16", "buffer": "*u8", "scales": "*fp32", "block_ids": "*i64", "row_bytes": "i32"}
    if name == "quantise_heads":
        signature |= {"largest": "fp32", "least_scale": "fp32"}
    constants = {"NUMBERS": 32 * 8 * block_size * 2 * 128, "HEADS": 32 * 8, "BLOCK_SIZE": block_size, "KINDS": 2}
    constants |= {"HEAD_DIM": 128, "BLOCK_SLOTS": slots, "BLOCK_D": width}
    return Job(f"kernels.gpu.blocks:{name}", signature, constants, aligned=("row_bytes",))


def sampling_job(search: bool) -> Job:
    names = ["logits", "temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions", "weights", "ids", "out"]
    types = ["*fp32", "*fp32", "*i32", "*fp64", "*fp32", "*i64", "*i64", "*fp32", "*i32", "*i64"]
    signature = dict(zip(names, types, strict=True)) | {"vocab": "i32", "stride_row": "i32"}
    constants = {"SEARCH": search, "BLOCK": sampling.sampling_block(128256)}
    return Job("kernels.gpu.sampling:draw_tokens", signature, constants, 90, 16, 3, ("vocab", "stride_row"))


def seats_job() -> Job:
    signature = {"memory": "*i64", "sampled": "*i64", "wide": "*i64", "narrow": "*i32", "spans": "*i32"}
    signature |= {"tables": "*i32", **dict.fromkeys(("size", "vocab", "num_seats", "seat_words", "width"), "i32")}
    constants = {"BLOCK_SIZE": 64, "ENTRIES": seats.ENTRIES}
    return Job("kernels.gpu.seats:place_rows", signature, constants, num_warps=seats.WARPS)


# What it is -> the job, the widest reads and writes that are expected of it (32-bit words), and a limit on registers.
JOBS: dict[str, tuple[Job, int, int, int]] = {
    "norm of 4,096": (norm_job(4096, False), 4, 4, 64),
    "sum and norm of 576": (norm_job(576, True), 4, 4, 64),
    "sum and norm of 4,096": (norm_job(4096, True), 4, 4, 80),
    "rotary, Gemma 3": (rotary_job(4, 1, 256, rotary.EACH, False), 4, 4, 64),
    "rotary, OLMo 3 32B": (rotary_job(40, 8, 128, rotary.WIDE, False), 4, 4, 64),
    "rotary, e4m3 cache": (rotary_job(32, 8, 128, rotary.PLAIN, True), 4, 2, 64),
    "silu": (gated_job(0), 4, 4, 64),
    "gelu": (gated_job(1), 4, 4, 64),
    "clamped swiglu": (gated_job(2), 4, 4, 64),
    "blocks out": (copy_job(True), 4, 4, 64),
    "blocks in": (copy_job(False), 4, 4, 64),
    "sums of blocks": (sums_job(), 4, 1, 96),
    "rows from seats": (seats_job(), 2, 1, 64),
    "sampling": (sampling_job(False), 4, 0, 96),
    "sampling, top_k and top_p": (sampling_job(True), 4, 0, 128),
}
for size in BLOCK_SIZES:
    JOBS[f"rotary, blocks of {size}"] = (rotary_job(32, 8, 128, rotary.PLAIN, False, size), 4, 4, 64)
    JOBS[f"blocks of {size} out, e4m3"] = (quantised_job("quantise_heads", size), 4, 2, 128)
    JOBS[f"blocks of {size} in, e4m3"] = (quantised_job("dequantise_heads", size), 2, 4, 128)
CAPABILITIES = (80, 90)


@pytest.fixture(scope="module", params=CAPABILITIES)
def compiled(request: pytest.FixtureRequest) -> dict[str, Compiled]:
    """By what it is, for one chip after the other."""
    results = compile_kernels([replace(job, capability=request.param) for job, *_ in JOBS.values()])
    return dict(zip(JOBS, results, strict=True))


def widest(ptx: str, instruction: str) -> int:
    """32-bit words that one thread moves in the widest such instruction."""
    sizes = re.findall(rf"\b{instruction}\.global(?:\.[a-zA-Z0-9_:]+)*?(?:\.v([248]))?\.[bfsu](16|32|64)\b", ptx)
    return max((int(count or 1) * int(bits) // 32 for count, bits in sizes), default=0)


@pytest.mark.parametrize("name", JOBS)
def test_compiled(compiled: dict[str, Compiled], name: str) -> None:
    _, read, written, registers = JOBS[name]
    found = compiled[name]
    assert found.spills == 0
    assert found.registers <= registers
    assert widest(found.ptx, "ld") >= read and widest(found.ptx, "st") >= written


def test_addresses_of_blocks_are_64_bits_wide(compiled: dict[str, Compiled]) -> None:
    """Those of the bytes of 100,000 blocks of 8 MiB: the product with the block's number is made of 64-bit integers."""
    for name in ("blocks out", "blocks of 64 in, e4m3", "blocks of 64 out, e4m3", "rotary, blocks of 64"):
        ttir = compiled[name].ttir
        blocks_read = re.findall(r"(%\w+) = (?:tt\.load .* : !tt\.ptr<i64>|arith\.(?:divsi|addi) .* : i64)", ttir)
        factors = re.findall(r"arith\.muli (%\w+), %\w+ : i64", ttir)
        assert set(blocks_read) & set(factors)


def test_no_size_of_head_needs_a_tile_of_nothing() -> None:
    for dim in (24, 64, 80, 96, 128, 256):
        slots, width = blocks.quantised_tile(16, dim)
        half, heads, _ = rotary.rotary_tile(9, dim)
        assert slots >= 1 and width >= dim and 2 * half >= dim and heads >= 1
    assert torch.tensor([norm.norm_tile(w)[1] >= w for w in (1, 63, 576, 16384)]).all()
