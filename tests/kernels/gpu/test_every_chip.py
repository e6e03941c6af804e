"""Every kernel, compiled for every kind of chip: it fits into shared memory and registers, and hardly spills.

A tile that is too large for a chip fails at its first launch there, which no machine without that chip sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kernels.gpu.latent_attention import decode_config as latent_decode_config
from kernels.gpu.latent_attention import prefill_config as latent_prefill_config
from kernels.gpu.products.experts import FEW_ROWS, MANY_ROWS
from kernels.gpu.products.invariant import DENSE, DENSE_MANY, FLOAT32

from . import test_experts, test_held_linear, test_lora
from .compiled import CHIPS, MULTIPROCESSOR_REGISTERS, Compiled, Job, Target, compile_kernels
from .test_ahead_of_time import (
    GEMMA3,
    GPT_OSS,
    LIST,
    LLAMA,
    LLAMA_FLOAT8,
    LLAMA_FLOAT8_BITS,
    MISTRAL,
    PHI3,
    REDUCE,
    SMOLLM2,
    decode_config_of,
    decode_job,
    prefill_job,
)
from .test_compile_elementwise import JOBS as ELEMENTWISE
from .test_invariant import SHAPES, dense_job
from .test_latent_attention import SPLIT, WHOLE
from .test_latent_attention import job as latent_job

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(600)]
FEW_SPILLS = 20
"""Instructions, or AMD's registers: a few around a loop cost nothing, hundreds would be in it."""
LATENT_FLOAT8_SPILLS = 110
"""Of attention over latents in e4m3, whose conversion takes registers that the sums of 512 numbers a row need."""
VECTOR_REGISTERS = 512
"""Of AMD's chips, a thread of one wave on a SIMD, of which a multiprocessor has four."""
MODELS = {"Llama": LLAMA, "SmolLM2": SMOLLM2, "Mistral": MISTRAL, "Phi-3": PHI3, "gpt-oss": GPT_OSS, "Gemma 3": GEMMA3}


def shapes(chip: Target) -> Iterator[tuple[str, object]]:
    """Models, and a Llama with an e4m3 cache as this chip reads it."""
    yield from MODELS.items()
    yield "Llama, e4m3", LLAMA_FLOAT8 if CHIPS[chip].converts_e4m3 else LLAMA_FLOAT8_BITS


def latent_jobs(chip: Target, cache: str) -> dict[str, Job]:
    decode = latent_decode_config(torch.bfloat16, CHIPS[chip])
    prefill = latent_prefill_config(torch.bfloat16, CHIPS[chip])
    tiles = {"BLOCK_M": prefill.rows, "GROUP": prefill.rows}
    return {
        "decode": latent_job("attend_latent_splits", decode, chip, 16, cache, BLOCK_G=decode.rows),
        "prefill": latent_job("attend_latent_tiles", prefill, chip, 128, cache, **tiles, **WHOLE),
        "split": latent_job("attend_latent_tiles", prefill, chip, 128, cache, **tiles, **SPLIT),
    }


def jobs(chip: Target) -> dict[str, Job]:
    """By what it is."""
    found: dict[str, Job] = {"reduce": replace(REDUCE, capability=chip), "list": replace(LIST, capability=chip)}
    for name, shape in shapes(chip):
        found[f"decode attention, {name}"] = decode_job(shape, chip)
        found[f"prefill attention, {name}"] = prefill_job(shape, chip)
        found[f"split attention, {name}"] = prefill_job(shape, chip, split=True)
    small = "fp8e4nv" if CHIPS[chip].converts_e4m3 else "u8"
    for cache, words in (("bf16", ""), (small, ", e4m3")):
        found |= {f"latent {kind}{words}": job for kind, job in latent_jobs(chip, cache).items()}
    products = (*test_held_linear.held_jobs(chip), *test_experts.held_jobs(chip))
    for rows in (FEW_ROWS, MANY_ROWS):
        products += (test_experts.dense_job(chip, rows), *test_lora.lora_jobs(chip, rows))
    for tile, kind in ((DENSE, "bf16"), (DENSE_MANY, "bf16"), (FLOAT32, "fp32")):
        products += (dense_job(SHAPES["8B down"], tile, chip, kind),)
    found |= {f"product {index}: {job.kernel}": job for index, job in enumerate(products)}
    return found | {name: replace(job, capability=chip) for name, (job, *_) in ELEMENTWISE.items()}


def problems(chip: Target, name: str, job: Job, found: Compiled) -> Iterator[str]:
    kind, waves = CHIPS[chip], max(1, job.num_warps // 4)
    if found.shared_bytes > kind.shared_bytes:
        yield f"{name}: {found.shared_bytes:,} bytes of shared memory, the chip has {kind.shared_bytes:,}"
    threads = -(-found.registers // 8) * 8 * 32 * job.num_warps
    if kind.vendor == "nvidia" and threads > MULTIPROCESSOR_REGISTERS:
        yield f"{name}: {threads:,} registers"
    if kind.vendor == "amd" and found.registers * waves > VECTOR_REGISTERS:
        yield f"{name}: {found.registers} registers a thread of {job.num_warps} waves"
    is_small = name.startswith("latent") and job.signature["kv"] != "*bf16"
    most = LATENT_FLOAT8_SPILLS if is_small else FEW_SPILLS
    if found.spills > most:
        yield f"{name}: {found.spills} spills"


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_every_kernel_fits(chip: Target) -> None:
    every = jobs(chip)
    compiled = dict(zip(every, compile_kernels([*every.values()]), strict=True))
    assert [words for name, job in every.items() for words in problems(chip, name, job, compiled[name])] == []
    for name, shape in shapes(chip):  # as often as the grid of decode steps expects
        found, config = compiled[f"decode attention, {name}"], decode_config_of(shape, chip)
        reserved = 1024 if CHIPS[chip].vendor == "nvidia" else 0  # of each program, by the driver
        assert (found.shared_bytes + reserved) * config.programs <= CHIPS[chip].shared_bytes + reserved, name


@pytest.mark.slow_except("decode attention, Llama-gfx942")
@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("latent prefill", 89),
        ("decode attention, Llama", "gfx942"),
        ("prefill attention, Llama", "gfx942"),
    ],
)
def test_what_was_too_large_fits(name: str, chip: Target) -> None:
    """100 KiB on chips that have 99, and 84 to 112 KiB on one that has 64 and was taken for a Hopper."""
    job = {
        "latent prefill": latent_jobs(chip, "bf16")["prefill"],
        "decode attention, Llama": decode_job(LLAMA, chip),
        "prefill attention, Llama": prefill_job(LLAMA, chip),
    }[name]
    (compiled,) = compile_kernels([job])
    assert not [*problems(chip, name, job, compiled)]
