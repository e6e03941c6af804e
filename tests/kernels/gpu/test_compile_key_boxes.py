"""Prefill attention by boxes, compiled for chips that need not be there: TMA copies keys, and what that takes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from common.config.worker import BLOCK_SIZES
from kernels.gpu.tiles.key_box import refusal

from .compiled import CHIPS, MULTIPROCESSOR_REGISTERS, Compiled, Job, Target, compile_kernels
from .test_ahead_of_time import GEMMA3, GPT_OSS, LLAMA, LLAMA_FLOAT8, PHI3, SMOLLM2, Shape, prefill_job

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(600), pytest.mark.slow]
GEMMA2 = Shape(42, 8, 2, 256, features="window softcap")
SHAPES = [
    *(LLAMA, LLAMA_FLOAT8, SMOLLM2, GPT_OSS, GEMMA3, GEMMA2, PHI3),
    *(replace(LLAMA, block_size=size) for size in BLOCK_SIZES if size > LLAMA.block_size),
]
TMA_COPY = "cp.async.bulk.tensor.3d"
WIDE_COPY = re.compile(r"LDGSTS\.E\S*\.128")
"""16 bytes by pointers. Entries of block tables, of 4 bytes, come by pointers in either form."""
WARPS = 8
BARRIER_BYTES = 128
"""Of shared memory: TMA says through a barrier a stage that a box is there."""


def boxes_job(shape: Shape, capability: Target = 90, *, split: bool = False) -> Job:
    job = prefill_job(shape, capability, split=split)
    known = {name: value for name, value in job.constexprs.items() if name != "boxes"}
    box = f"tensordesc<{shape.cache}[{known['BLOCK_N']}, 1, {known['BLOCK_D']}]>"
    return replace(job, signature={**job.signature, "boxes": box}, constexprs=known)


class CompiledForms(dict[Any, Compiled]):
    """By (shape, whether by boxes); one shape alone for `make test`, all others together."""

    def __missing__(self, name: tuple[Shape, bool]) -> Compiled:
        shapes = [SMOLLM2] if name[0] == SMOLLM2 else [shape for shape in SHAPES if shape != SMOLLM2]
        names = [(shape, boxes) for shape in shapes for boxes in (False, True)]
        jobs = [boxes_job(shape) if boxes else prefill_job(shape, 90) for shape, boxes in names]
        self.update(zip(names, compile_kernels(jobs), strict=True))
        return self[name]


@pytest.fixture(scope="module")
def compiled() -> CompiledForms:
    return CompiledForms()


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_are_copied_by_tma(compiled: CompiledForms, shape: Shape) -> None:
    by_pointers, by_boxes = compiled[shape, False], compiled[shape, True]
    assert by_boxes.ptx.count(TMA_COPY) >= 4 and "UTMALDG" in by_boxes.sass
    assert TMA_COPY not in by_pointers.ptx and "UTMALDG" not in by_pointers.sass
    assert WIDE_COPY.search(by_pointers.sass) and not WIDE_COPY.search(by_boxes.sass), "keys are copied by pointers"


@pytest.mark.parametrize("shape", SHAPES)
def test_as_many_programs_fit_as_by_pointers(compiled: CompiledForms, shape: Shape) -> None:
    by_pointers, by_boxes = compiled[shape, False], compiled[shape, True]
    assert by_boxes.spills == 0 and by_boxes.shared_bytes <= by_pointers.shared_bytes + BARRIER_BYTES
    assert programs(by_boxes) >= programs(by_pointers) >= 1


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_made_alike(compiled: CompiledForms, shape: Shape) -> None:
    """By the same instructions of tensor cores, as many of them."""
    by_pointers, by_boxes = compiled[shape, False], compiled[shape, True]
    assert products(by_boxes) == products(by_pointers) != []


def programs(found: Compiled) -> int:
    """How many a multiprocessor holds."""
    registers = -(-found.registers // 8) * 8 * 32 * WARPS
    return min(MULTIPROCESSOR_REGISTERS // registers, (CHIPS[90].shared_bytes + 1024) // (found.shared_bytes + 1024))


def products(found: Compiled) -> list[str]:
    """The instructions of tensor cores."""
    return re.findall(r"wgmma\.mma_async\S+", found.ptx)


def test_blackwell_copies_them_by_tma_too() -> None:
    (found,) = compile_kernels([boxes_job(SMOLLM2, 100)])
    assert TMA_COPY in found.ptx and "tcgen05.mma" in found.ptx and found.spills == 0


def test_splits_are_copied_by_tma_too() -> None:
    (found,) = compile_kernels([boxes_job(SMOLLM2, split=True)])
    assert found.ptx.count(TMA_COPY) >= 4 and found.spills == 0


def test_a_chip_without_tma_gets_no_boxes() -> None:
    """Triton would make pointers of them that copy 4 bytes at a time: the host asks for none there."""
    kv = torch.empty(9, SMOLLM2.layers, SMOLLM2.kv_heads, 64, 2, SMOLLM2.head_dim, dtype=torch.bfloat16, device="meta")
    assert refusal(kv, 32, CHIPS[80]) and not refusal(kv, 64, CHIPS[90])
    (found,) = compile_kernels([boxes_job(SMOLLM2, 80)])
    assert TMA_COPY not in found.ptx and "LDGSTS.E " in found.sass
    assert not WIDE_COPY.search(found.sass)
