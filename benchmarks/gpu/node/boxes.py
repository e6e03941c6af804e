"""Prefill attention whose keys and values TMA copies by boxes, beside that by pointers: the same bits, in what time?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from benchmarks.gpu.attention import awkward_problem, prefill_case
from benchmarks.gpu.gate import poisoned
from benchmarks.gpu.node.verdict import Verdict
from benchmarks.gpu.shape import GPUShape
from benchmarks.gpu.tiles import instead
from benchmarks.gpu.timer import Timer
from kernels.gpu import backend as triton_backend
from kernels.gpu import prefill_attention
from kernels.gpu.prefill_attention import prefill_config
from kernels.gpu.tiles.chip import chip_of
from kernels.gpu.tiles.key_box import refusal

AWKWARD = "awkward lengths"


def box_rows(shape: GPUShape, timer: Timer, *, short: bool) -> Iterator[dict[str, Any]]:
    """A row for sequences of awkward lengths, by boxes beside the reference, and one for each prompt, in both forms.

    One row alone, with the reason, where the chip or the shape has no boxes.
    """
    refused = refused_by(shape, timer.device)
    if refused:
        yield {"case": AWKWARD, "refused": refused}
        return
    with poisoned(), form(shape, timer.device, boxes=True):
        problem = awkward_problem(triton_backend, shape, timer.device, short=short)
    yield {"case": AWKWARD, "refused": "", "problem": problem}
    for length in shape.prefill_lengths:
        yield prompt_row(shape, length, timer)


def prompt_row(shape: GPUShape, length: int, timer: Timer) -> dict[str, Any]:
    """Numbers of the output that differ, and microseconds of either form."""
    case, found, microseconds = prefill_case(triton_backend, shape, length, timer.device), [], []
    for boxes in (False, True):
        with form(shape, timer.device, boxes=boxes):
            found.append(case.calls[0]())
            microseconds.append(round(timer.calls(case.calls) * 1e6, 2))
    by_pointers, by_boxes = (output for output in found if isinstance(output, torch.Tensor))
    different = int((by_pointers != by_boxes).sum())
    times = {"pointers_us": microseconds[0], "boxes_us": microseconds[1]}
    return {"case": f"{length:,} tokens", "refused": "", "numbers": by_boxes.numel(), "different": different, **times}


def form(shape: GPUShape, device: torch.device, *, boxes: bool) -> AbstractContextManager[None]:
    """The kernel's own tiles, in one form or the other."""
    config = prefill_config(shape.head_dim, shape.dtype, chip_of(device))
    return instead(prefill_attention, "prefill_config", config._replace(boxes=boxes))


def refused_by(shape: GPUShape, device: torch.device) -> str:
    """As `refusal`, of a cache of this shape."""
    chip = chip_of(device)
    tile = prefill_config(shape.head_dim, shape.dtype, chip).tile
    sizes = (1, 1, shape.num_kv_heads, shape.block_size, 2, shape.head_dim)
    return refusal(torch.empty(sizes, dtype=shape.dtype, device="meta"), tile, chip)


def of_boxes(row: dict[str, Any]) -> Verdict:
    if row["refused"]:
        return Verdict("boxes", row["case"], False, row["refused"], "", "there are no boxes to measure")
    if "problem" in row:
        return Verdict("boxes", row["case"], not row["problem"], row["problem"] or "agree", "the reference's numbers")
    times = f"{row['boxes_us']:,.1f} us by boxes, {row['pointers_us']:,.1f} us by pointers"
    found = f"{row['different']} of {row['numbers']:,} numbers differ; {times}"
    return Verdict("boxes", row["case"], row["different"] == 0, found, "none, bit for bit")
