"""Attention over latents in Triton against float64, and compiled for chips that need not be there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.config.worker import BLOCK_SIZES
from kernels import LatentNorm, gather_blocks, scatter_blocks
from kernels.gpu import attention, device_plan, work_list
from kernels.gpu.blocks import gather_blocks as gather_on_device
from kernels.gpu.blocks import scatter_blocks as scatter_on_device
from kernels.gpu.device_plan import GPUPlan
from kernels.gpu.latent_attention import LatentTile, decode_config, prefill_config
from kernels.gpu.latents import latent_tile, write_latents
from kernels.gpu.tiles.chip import HOPPER
from kernels.interface.kernels import AttentionRule
from kernels.plain import backend as plain

from .attention_case import attend, error
from .compiled import CHIPS, Job, Target, compile_kernels

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
MIXED = [(1, 0), (3, 0), (1, 64), (20, 37), (1, 150), (2, 127)]


@pytest.mark.slow_except("3-56-48-16-dtype0")
@pytest.mark.interpret
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "dim", "latent_dim", "block"), [(3, 56, 48, 16), (20, 80, 64, 64)])
def test_single_rows_and_chunks(
    make_case: Any, device: torch.device, dtype: torch.dtype, heads: int, dim: int, latent_dim: int, block: int
) -> None:
    """Heads that fill less than a tile, and more than one of float32's."""
    case = make_case(MIXED, heads=heads, kv_heads=1, dim=dim, block=block, dtype=dtype, latent_dim=latent_dim)
    assert error(case, attend(case, device)) < TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.interpret
def test_the_sizes_of_deepseek(make_case: Any, device: torch.device) -> None:
    case = make_case([(1, 40), (2, 30)], heads=16, kv_heads=1, dim=576, block=64, dtype=torch.bfloat16, latent_dim=512)
    assert error(case, attend(case, device)) < 2e-2


@pytest.mark.interpret
@pytest.mark.parametrize("by_bits", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_float8_cache(make_case: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch, by_bits: bool) -> None:
    if by_bits:
        monkeypatch.setattr("kernels.gpu.scores.chip_of", lambda device: CHIPS[80])
    case = make_case([(1, 70), (9, 20)], heads=4, kv_heads=1, dim=80, latent_dim=64, dtype=torch.float16)
    case.kv = case.kv.to(torch.float8_e4m3fn)
    assert error(case, attend(case, device)) < 3e-3


@pytest.mark.slow
@pytest.mark.interpret
def test_a_sequence_does_not_depend_on_its_batch(
    make_case: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With splits and without, alone and in a wider plan; padding of the plan stays unwritten."""
    for module in (work_list, device_plan):
        monkeypatch.setattr(module, "SPLIT_TOKENS", 64)
    case = make_case([(1, 327), (1, 17), (1, 64)], heads=4, kv_heads=1, dim=48, latent_dim=32, dtype=torch.float16)
    together, spans = attend(case, device), case.spans
    assert error(case, together) < 2e-3
    wide = GPUPlan.empty(5, 40, case.layout, case.heads, device)
    wide.fill(spans[:2])
    found = attend(case, device, wide)
    assert torch.equal(found[:2], together[:2]) and found[2].isnan().all()
    for span in spans:
        case.spans = [span]
        assert torch.equal(attend(case, device)[span.row], together[span.row])


@pytest.mark.interpret
def test_what_latents_do_not_have_is_refused(make_case: Any, device: torch.device) -> None:
    case = make_case([(1, 3)], heads=2, kv_heads=1, dim=48, latent_dim=32)
    plan = attention.plan_attention(case.spans, case.layout, 2, device)
    with pytest.raises(ValueError, match="no window"):
        attention.paged_attention(case.q, case.kv, 0, plan, AttentionRule(1.0, window=5, latent_dim=32))


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kept", "scale"), [("same", 1.0), ("float8", 1.0), ("float8", 0.3)])
def test_writing(device: torch.device, dtype: torch.dtype, kept: str, scale: float) -> None:
    """As plain torch does; a token without a slot is padding."""
    tokens, heads, nope, rank, rope = 4, 5, 20, 40, 12
    cache = dtype if kept == "same" else torch.float8_e4m3fn
    q, absorbed = torch.randn(tokens, heads * (nope + rope)).to(dtype), torch.randn(tokens, heads * rank).to(dtype)
    made, weight = torch.randn(tokens, rank + rope).to(dtype) * 3, torch.rand(rank) + 0.5
    angles, slots = torch.rand(tokens, rope // 2) * 6, torch.tensor([3, 17, -1, 63])
    inputs = [t.to(device) for t in (q, absorbed, made, angles.cos(), angles.sin())]
    kv = torch.full((4, 2, 1, 16, 1, rank + rope), float("nan")).to(cache).to(device)
    found = write_latents(*inputs, kv, 1, slots.to(device), LatentNorm(weight.to(device), 1e-6), scale).cpu()
    kept_rows = torch.tensor([0, 1, 3])
    expected_kv = torch.full(kv.shape, float("nan")).to(cache)
    rows = [t.cpu()[kept_rows] for t in inputs]
    expected = plain.write_latents(*rows, expected_kv, 1, slots[kept_rows], LatentNorm(weight, 1e-6), scale)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype] if kept == "same" else 0.08
    torch.testing.assert_close(found[kept_rows].float(), expected.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(kv.cpu().float(), expected_kv.float(), rtol=tolerance, atol=tolerance, equal_nan=True)
    assert found[2].isnan().all()


@pytest.mark.slow
@pytest.mark.interpret
def test_blocks_on_the_wire(device: torch.device) -> None:
    """The bytes of plain torch, as they are and in 8 bits."""
    kv, ids = torch.randn(5, 3, 1, 16, 1, 80).to(torch.bfloat16), torch.tensor([4, 1])
    for quantised in (False, True):
        expected = gather_blocks(kv, ids, quantised=quantised)
        found = torch.empty_like(expected, device=device)
        gather_on_device(kv.to(device), ids.to(device), found, quantised)
        assert torch.equal(found.cpu(), expected)
        back, there = torch.zeros_like(kv), torch.zeros_like(kv, device=device)
        scatter_blocks(expected, back, ids, quantised=quantised)
        scatter_on_device(found, there, ids.to(device), quantised)
        assert torch.equal(there.cpu(), back)


WHOLE = {"SPLIT": False, "partial": None, "lse": None}
SPLIT = {"SPLIT": True}


def job(
    kernel: str, config: LatentTile, capability: Target, heads: int, cache: str = "bf16", block: int = 64, **more: Any
) -> Job:
    """Of DeepSeek's attention."""
    signature = {
        **dict.fromkeys(("q", "out"), "*bf16"),
        **{"kv": f"*{cache}", "partial": "*fp32", "lse": "*fp32", "scale": "fp32", "v_scale": "fp32"},
        **dict.fromkeys(("block_tables", "spans", "items", "total", "tiles"), "*i32"),
        **dict.fromkeys(("layer", "table_width", "stride_q_row", "stride_q_head"), "i32"),
    }
    constants = {
        **{"NUM_LAYERS": 61, "NUM_HEADS": heads, "BLOCK_SIZE": block, "RANK": 512, "ROPE": 64, "BLOCK_C": 512},
        **{"BLOCK_R": 64, "BLOCK_N": config.tile, "STAGES": config.stages, "FP8_BITS": cache == "u8", **more},
    }
    aligned = ("stride_q_row", "stride_q_head")
    return Job(
        f"kernels.gpu.latent_attention:{kernel}", signature, constants, capability, config.warps, aligned=aligned
    )


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cache", ["bf16", "u8"])
def test_writing_compiled(cache: str) -> None:
    """V3's sizes: without spills, and rows by 16 bytes at once."""
    signature = {
        **dict.fromkeys(("q", "absorbed", "latents", "queries"), "*bf16"),
        **dict.fromkeys(("cos", "sin", "norm"), "*fp32"),
        **{"kv": f"*{cache}", "slots": "*i64", "layer": "i32", "num_layers": "i32", "eps": "fp32"},
        "k_scale": "fp32",
    }
    width, heads, warps = latent_tile(128, 512)
    constants = {
        **{"NUM_HEADS": 128, "QUERY_DIM": 192, "RANK": 512, "ROPE": 64, "BLOCK_C": width},
        **{"BLOCK_HALF": 32, "BLOCK_HEADS": heads, "FP8": cache == "u8"},
    }
    sizes = [constants | {"BLOCK_SIZE": size} for size in BLOCK_SIZES]
    jobs = [Job("kernels.gpu.latents:write_tokens", signature, each, 90, warps) for each in sizes]
    for found in compile_kernels(jobs):
        assert found.spills == 0 and "STG.E.128" in found.sass


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", [80, 90])
def test_compiled(capability: Target) -> None:
    """Single rows of V2-Lite's 16 heads, chunks of V3's 128: on tensor cores, without spills, in a chip's memory."""
    decode = decode_config(torch.bfloat16, CHIPS[capability])
    prefill = prefill_config(torch.bfloat16, CHIPS[capability])
    tiles = {"BLOCK_M": prefill.rows, "GROUP": prefill.rows}
    jobs = [
        job("attend_latent_splits", decode, capability, 16, BLOCK_G=decode.rows),
        *(job("attend_latent_tiles", prefill, capability, 128, **tiles, **kind) for kind in (WHOLE, SPLIT)),
    ]
    for one, found in zip(jobs, compile_kernels(jobs), strict=True):
        assert found.spills == 0, one
        assert found.shared_bytes <= CHIPS[capability].shared_bytes, one
        assert "HMMA" in found.sass
        assert "LDGSTS" in found.sass, "keys are not copied ahead"


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.timeout(900)
def test_compiled_for_every_size_of_block() -> None:
    """For Hopper; with blocks of 16, half a tile of keys, single rows spill three registers."""
    decode, prefill = decode_config(torch.bfloat16, HOPPER), prefill_config(torch.bfloat16, HOPPER)
    sizes = [size for size in BLOCK_SIZES if size != 64]
    rows = [job("attend_latent_splits", decode, 90, 16, block=size, BLOCK_G=decode.rows) for size in sizes]
    tiles = {"BLOCK_M": prefill.rows, "GROUP": prefill.rows}
    chunks = [
        job("attend_latent_tiles", prefill, 90, 128, block=size, **tiles, **kind)
        for size in sizes
        for kind in (WHOLE, SPLIT)
    ]
    found = [compiled.spills for compiled in compile_kernels([*rows, *chunks])]
    assert all(spills <= (12 if size == 16 else 0) for size, spills in zip(sizes, found[: len(sizes)], strict=True))
    assert found[len(sizes) :] == [0] * len(chunks)
