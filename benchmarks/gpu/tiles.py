"""Attention with other tiles than the kernels choose, to find the best ones for a new chip."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from benchmarks.gpu.attention import decode_case, prefill_case
from benchmarks.gpu.case import words_of
from benchmarks.gpu.chip import Chip
from benchmarks.gpu.shape import GPUShape
from benchmarks.gpu.timer import Timer
from kernels.gpu import backend as triton_backend
from kernels.gpu import decode_attention, prefill_attention, work_list
from kernels.gpu.decode_attention import DecodeConfig, decode_config
from kernels.gpu.prefill_attention import PrefillConfig, prefill_config
from kernels.gpu.tiles.chip import chip_of

DECODE = (
    DecodeConfig(tile=64, warps=4, stages=5, programs=2),
    DecodeConfig(tile=64, warps=4, stages=7, programs=2),
    DecodeConfig(tile=64, warps=4, stages=4, programs=3),
    DecodeConfig(tile=64, warps=2, stages=5, programs=3),
    DecodeConfig(tile=32, warps=4, stages=7, programs=4),
    DecodeConfig(tile=32, warps=2, stages=7, programs=4),
)
SPLITS = (256, 1024)
"""Tokens of a split, beside the kernels' own choice."""
PREFILL = (
    PrefillConfig(rows=128, tile=64, warps=8, stages=3),
    PrefillConfig(rows=128, tile=64, warps=8, stages=7),
    PrefillConfig(rows=128, tile=64, warps=8, stages=5, boxes=True),
    PrefillConfig(rows=64, tile=64, warps=4, stages=5, boxes=True),
    PrefillConfig(rows=128, tile=128, warps=8, stages=3),
    PrefillConfig(rows=128, tile=128, warps=8, stages=5),
    PrefillConfig(rows=64, tile=64, warps=4, stages=5),
    PrefillConfig(rows=64, tile=64, warps=4, stages=3),
)
DRY_DECODE, DRY_PREFILL = (DecodeConfig(16, 4, 2, 1),), (PrefillConfig(16, 16, 4, 2),)
Config = DecodeConfig | PrefillConfig


def measure_tiles(shape: GPUShape, chip: Chip, timer: Timer) -> Iterator[dict[str, Any]]:
    """One row for each choice of tiles, the kernels' own first: us and the share of the floor, or the error."""
    dry = timer.device.type != "cuda"
    kind = (shape.head_dim, shape.dtype)
    chosen = decode_config(*kind, shape.dtype.itemsize, chip_of(timer.device))
    usual = work_list.SPLIT_TOKENS
    for config in (chosen, *(DRY_DECODE if dry else DECODE)):
        yield decode_row(shape, config, usual, chip, timer)
    for split in SPLITS:
        yield decode_row(shape, chosen, split, chip, timer)
    first = prefill_config(*kind, chip_of(timer.device))
    for tiles in (first, *(DRY_PREFILL if dry else PREFILL)):
        yield prefill_row(shape, tiles, chip, timer)


def decode_row(shape: GPUShape, config: DecodeConfig, split: int, chip: Chip, timer: Timer) -> dict[str, Any]:
    """The largest batch of decode steps."""
    with instead(decode_attention, "decode_config", config), patch.object(work_list, "SPLIT_TOKENS", split):
        found = _measured(decode_case, shape, max(shape.decode_batches), chip, timer)
    return {"kernel": "decode attention", "tiles": _label(config), "split": split, **found}


def prefill_row(shape: GPUShape, config: PrefillConfig, chip: Chip, timer: Timer) -> dict[str, Any]:
    """The longest prompt."""
    with instead(prefill_attention, "prefill_config", config):
        found = _measured(prefill_case, shape, max(shape.prefill_lengths), chip, timer)
    return {"kernel": "prefill attention", "tiles": _label(config), "split": "", **found}


@contextmanager
def instead(module: Any, name: str, config: Config) -> Iterator[None]:
    """Make the function `name` of `module` return `config`."""
    with patch.object(module, name, lambda *_: config):
        yield


def _measured(make: Any, shape: GPUShape, size: int, chip: Chip, timer: Timer) -> dict[str, Any]:
    """Time one choice; tiles that fail or compute wrong results have an error instead."""
    try:
        case = make(triton_backend, shape, size, timer.device)
        problem = case.problem()
        if problem:
            return {"us": 0.0, "of_floor": 0.0, "problem": problem}
        seconds = timer.calls(case.calls)
    except Exception as error:  # it does not fit, or does not compile: Triton says so in errors of many kinds
        return {"us": 0.0, "of_floor": 0.0, "problem": words_of(error)}
    floor = chip.floor(case.num_bytes, case.num_flops)
    return {"us": round(seconds * 1e6, 2), "of_floor": round(floor / seconds, 4), "problem": ""}


def _label(config: Config) -> str:
    return ", ".join(f"{name} {value}" for name, value in config._asdict().items())
