"""How many kernels a decode step runs on the device, and how many calls of the host launch them: eager and recorded.

They are counted by torch's profiler, not by what the code means to launch: CUPTI tells each kernel of a replayed graph.
A CPU has neither; there the operators that no other one calls stand for kernels, so a dry run counts in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.engine import recorded
from benchmarks.gpu.model import random_model
from benchmarks.gpu.node.verdict import Verdict
from benchmarks.gpu.shape import GPUShape
from common.engine.kv.cache import KVCache
from common.engine.models.batch import SequenceChunk
from common.engine.run.runner import ModelRunner
from common.engine.run.seats import FROM_HOST
from common.engine.run.step_launchers import StepLauncher
from common.engine.sampling.sampler import Sampler, SamplingRow
from common.wire.sampling_params import SamplingParams


class Steps(NamedTuple):
    """Decode steps before the count, in which kernels compile and sequences get their seats, and in it."""

    warm: int
    counted: int


FULL, SHORT = Steps(3, 4), Steps(1, 2)
"""On a chip, and in a dry run, whose interpreter is slow."""
LAUNCHES = {
    "cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaLaunchCooperativeKernel",
    "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync", "hipLaunchKernel", "hipExtModuleLaunchKernel",
    "hipModuleLaunchKernel", "hipGraphLaunch", "hipMemcpyAsync", "hipMemcpyWithStream", "hipMemsetAsync",
}  # fmt: skip
"""Calls of the runtime and of the driver by which work gets to the device."""
MOST_CALLS = 3.0
"""Of a recorded step in which no seat changes: the graphs of model and draw, and the copy of the tokens."""
NAMED, NAME_CHARS = 12, 80


class Counts(NamedTuple):
    """What ran on the device, by name, and the calls that launched it."""

    kernels: Counter[str]
    calls: Counter[str]


def count(run: Callable[[], object], device: torch.device) -> Counts:
    """Of one call of `run`, up to the end of what it launches."""
    on_cpu = device.type == "cpu"
    with profile(activities=[ProfilerActivity.CPU, *([] if on_cpu else [ProfilerActivity.CUDA])]) as seen:
        run()
        if not on_cpu:
            torch.cuda.synchronize(device)
    kernels, calls = Counter[str](), Counter[str]()
    for event in seen.events():
        if event.device_type != DeviceType.CPU:
            kernels[event.name] += 1
        elif event.name in LAUNCHES:
            calls[event.name] += 1
        elif on_cpu and event.cpu_parent is None and event.name.startswith("aten::"):
            kernels[event.name] += 1
    return Counts(kernels, calls)


def launch_rows(shape: GPUShape, device: torch.device) -> Iterator[dict[str, Any]]:
    """A row for each batch and kind of step. What a layer runs is what a model of one layer more runs more."""
    layers, steps = shape.num_layers, steps_on(device).counted
    found = {depth: of_model(replace(shape, num_layers=depth), device) for depth in (layers - 1, layers)}
    for key, counts in found[layers].items():
        batch, how = key
        kernels, fewer = counts.kernels.total(), found[layers - 1][key].kernels.total()
        yield {
            "device": device.type,
            "how": how,
            "batch": batch,
            "layers": layers,
            "kernels": kernels / steps,
            "kernels_of_a_layer": (kernels - fewer) / steps,
            "calls": counts.calls.total() / steps,
            "calls_by_name": {name: number / steps for name, number in counts.calls.most_common()},
            "most_frequent": {n[:NAME_CHARS]: number / steps for n, number in counts.kernels.most_common(NAMED)},
        }


def of_model(shape: GPUShape, device: torch.device) -> dict[tuple[int, str], Counts]:
    """Of all counted steps, by rows and kind of step."""
    model, most = random_model(shape, device), max(shape.decode_batches)
    kv = KVCache(shape.config, 2 * most, shape.block_size, shape.dtype, device)
    plain, graphs = ModelRunner(model, kv), recorded(model, kv, shape)
    sampler, (warm, number) = Sampler(shape.vocab_size), steps_on(device)
    launcher = StepLauncher(graphs, sampler)
    found = {}
    for batch in shape.decode_batches:

        def eager(steps: Sequence[int], batch: int = batch) -> None:
            for step in steps:
                chunks = rows(shape, batch, step)
                sampler.sample(plain.forward(chunks), [sampling(chunk) for chunk in chunks])

        def replayed(steps: Sequence[int], batch: int = batch) -> None:
            for step in steps:
                launched = launcher.launch(rows(shape, batch, step), range(batch) if step else [FROM_HOST] * batch)
                launched.sample({})
                launched.read()

        for how, run in {"kernel by kernel": eager, "recorded": replayed}.items():
            run(range(warm))
            counted = range(warm, warm + number)
            found[batch, how] = count(lambda run=run, counted=counted: run(counted), device)  # type: ignore[misc]
    return found


def steps_on(device: torch.device) -> Steps:
    return SHORT if device.type == "cpu" else FULL


def rows(shape: GPUShape, batch: int, step: int) -> list[SequenceChunk]:
    """Of a decode step in the middle of each sequence's second block."""
    start = shape.block_size + 1 + step
    return [SequenceChunk((i % shape.vocab_size,), start, (2 * i, 2 * i + 1)) for i in range(batch)]


def sampling(chunk: SequenceChunk) -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=1, temperature=0.0), chunk.start + 1)


def of_launches(row: dict[str, Any]) -> Verdict:
    what = f"{row['how']}, {row['batch']} rows"
    kernels = f"{row['kernels']:g} kernels, {row['kernels_of_a_layer']:g} of them in each of {row['layers']} layers"
    if row["device"] == "cpu":
        return Verdict("launches", what, False, kernels.replace("kernels", "operators"), "", "a CPU launches nothing")
    found = f"{kernels}, launched by {row['calls']:g} calls"
    if row["how"] != "recorded":
        return Verdict("launches", what, row["kernels"] > 0, found, "they are counted")
    ok = row["kernels"] > 0 and 0 < row["calls"] <= MOST_CALLS
    return Verdict("launches", what, ok, found, f"at most {MOST_CALLS:g} calls")
