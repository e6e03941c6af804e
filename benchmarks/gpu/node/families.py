"""The check of a worker's start, at the shapes of several families of models and with every block size."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from benchmarks.gpu.node.verdict import Verdict
from benchmarks.gpu.shape import GPUShape
from kernels import AttentionRule
from kernels.agreement.run import check_kernels
from kernels.agreement.shape import CheckedShape, LayerRule
from kernels.backends import FOUND
from kernels.gpu import backend as triton_backend

LAYERS = 2
OTHER_BLOCKS = (16, 32, 128)
"""Block sizes that a worker supports, without the default."""
TOKENS = 8192
"""Of the cache that a check uses some blocks of: more than its longest sequence has."""


class Family(NamedTuple):
    """What the kernels know of a model. windows: one a kind of layer. cache: None for the activations' type."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    hidden: int
    width: int
    vocab: int
    windows: tuple[int, ...] = (0,)
    activation: str = "silu"
    softcap: float = 0.0
    sinks: bool = False
    qk_norm: bool = False
    block: int = 64
    cache: torch.dtype | None = None


LLAMA = Family("llama-8b", 32, 8, 128, 4096, 14336, 128_256)
FAMILIES = (
    LLAMA,
    LLAMA._replace(name="llama-8b, e4m3 cache", cache=torch.float8_e4m3fn),
    *(LLAMA._replace(name=f"llama-8b, blocks of {size}", block=size) for size in OTHER_BLOCKS),
    Family("gpt-oss-20b", 64, 8, 64, 2880, 2880, 201_088, (0, 128), "clamped_swiglu", sinks=True),
    Family("gemma3-1b", 4, 1, 256, 1152, 6912, 262_144, (0, 512), "gelu_tanh", qk_norm=True),
    Family("gemma2-9b", 16, 8, 256, 3584, 14336, 256_000, (0, 4096), "gelu_tanh", softcap=50.0),
    Family("mistral-7b", 32, 8, 128, 4096, 14336, 32_000, (4096,)),
    Family("smollm2-135m", 9, 3, 64, 576, 1536, 49_152),
    Family("phi3-mini", 32, 32, 96, 3072, 8192, 32_064, (2047,)),
)
DRY = Family("dry", 4, 2, 16, 24, 40, 120, (0, 20), sinks=True, block=16)


def family_of(shape: GPUShape) -> Family:
    """The family of the benchmark's own model."""
    return Family(
        shape.name, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.hidden, shape.intermediate,
        shape.vocab_size, block=shape.block_size,
    )  # fmt: skip


def family_row(family: Family, dtype: torch.dtype, device: torch.device, num_tokens: int = TOKENS) -> dict[str, Any]:
    """The check's findings and its seconds."""
    sinks = torch.randn(family.heads, device=device) if family.sinks else None
    rules = [
        LayerRule(min(layer, LAYERS - 1), AttentionRule(family.dim**-0.5, window, family.softcap, sinks))
        for layer, window in enumerate(family.windows)
    ]
    shape = CheckedShape(
        num_heads=family.heads,
        rules=rules,
        dtype=dtype,
        hidden_size=family.hidden,
        widths=[family.width],
        activation=family.activation,
        vocab_size=family.vocab,
        eps=1e-5,
        longest=num_tokens,
        qk_norm=family.qk_norm,
        device_kernels=True,
        quantised_wire=family.cache is None,
    )
    cache = family.cache or dtype
    blocks = -(-num_tokens // family.block)
    kv = torch.zeros(blocks, LAYERS, family.kv_heads, family.block, 2, family.dim, device=device).to(cache)
    began = time.perf_counter()
    with everywhere_triton():
        findings = check_kernels(shape, kv)
    return {
        "family": family.name,
        "kernels": len(findings),
        "seconds": round(time.perf_counter() - began, 2),
        "problems": [str(one) for one in findings if one.problem],
    }


def everywhere_triton() -> AbstractContextManager[object]:
    """The kernels under test for tensors of the CPU too, which a dry run has: in the interpreter."""
    return patch.dict(FOUND, {"cpu": triton_backend})


def family_rows(families: tuple[Family, ...], device: torch.device) -> Iterator[dict[str, Any]]:
    for family in families:
        yield family_row(family, torch.bfloat16, device)


def of_family(row: dict[str, Any]) -> Verdict:
    found = f"{row['kernels']} kernels agree, {row['seconds']:g} s"
    if row["problems"]:
        found = "; ".join(row["problems"])
    return Verdict("agreement", row["family"], not row["problems"], found, "all must agree with plain torch")
