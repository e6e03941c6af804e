"""Cases of the kernels around attention and the products: rotary embedding, norms, gates, sampling, block copies."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.attention import copies
from benchmarks.gpu.case import KernelCase, MakeCase
from benchmarks.gpu.gate import difference, first_problem
from benchmarks.gpu.shape import GPUShape
from benchmarks.gpu.timer import Call
from kernels import Draw, SamplingTensors
from kernels.agreement.seats import random_seats, seats_check, unwritten_rows
from kernels.blocks import wire_bytes
from kernels.interface.seats import POSITION, SeatLayout
from kernels.plain import reference
from kernels.plain.blocks import block_sums as sums_by_torch
from kernels.plain.blocks import gather_blocks as gather_by_torch
from kernels.plain.blocks import scatter_blocks as scatter_by_torch
from kernels.plain.sampling import sample_by_sorting

MAX_DIFFERENT_DRAWS = 1
"""Rounding may move the border between two tokens, with the noise beside it."""
EPS = 1e-5


def elementwise_cases(backend: Any, shape: GPUShape, device: torch.device) -> Iterator[MakeCase]:
    """At the sizes of a prefill chunk and of a decode step."""
    for tokens in (max(shape.prefill_lengths), max(shape.decode_batches)):
        for make in (rotate_case, norm_case, gated_case):
            yield partial(make, backend, shape, tokens, device)
    for greedy in (True, False):
        yield partial(sampling_case, backend, shape, device, greedy=greedy)
    yield partial(seats_case, backend, shape, device)
    for quantised in (False, True):
        for gathers in (True, False):
            yield partial(block_case, backend, shape, device, quantised=quantised, gathers=gathers)
    yield partial(sums_case, backend, shape, device)


def rotate_case(backend: Any, shape: GPUShape, tokens: int, device: torch.device) -> KernelCase:
    heads, half, itemsize = shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim // 2, shape.dtype.itemsize
    num_bytes = tokens * (2 * heads * shape.head_dim * itemsize + 2 * half * 4 + 8)
    count = copies(num_bytes, shape.rotate_bytes)
    blocks = -(-tokens // shape.block_size) + 1
    kv = torch.full((blocks, count, shape.num_kv_heads, shape.block_size, 2, shape.head_dim), float("nan"))
    kv = kv.to(device=device, dtype=shape.dtype)
    qkv = _random(shape, device, count, tokens, heads * shape.head_dim)
    angles = torch.rand(tokens, half, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    slots = torch.randperm(blocks * shape.block_size, device=device)[:tokens]

    def check() -> str:
        mine, plain = kv[:, :1].clone(), kv[:, :1].double()
        padded = slots.clone()
        padded[-1] = -1  # a padding row of a graph: its keys and values go nowhere
        found = backend.rotate_and_write(qkv[0], cos, sin, mine, 0, padded, None)
        few = slice(0, tokens - 1)
        expected = reference.rotate_and_write(
            qkv[0, few].double(), cos[few].double(), sin[few].double(), plain, 0, slots[few]
        )
        if not torch.equal(torch.isnan(mine), torch.isnan(plain)):
            return "slots were written that should not be"
        written = [("q", found[few], expected), ("kv", mine.nan_to_num(), plain.nan_to_num())]
        return first_problem(written, shape.dtype)

    calls: list[Call] = [
        lambda i=i: backend.rotate_and_write(qkv[i], cos, sin, kv, i, slots, None)  # type: ignore[misc]
        for i in range(count)
    ]
    return KernelCase("rotate and write", f"{tokens:,} tokens", num_bytes, 0, calls, check)


def norm_case(backend: Any, shape: GPUShape, tokens: int, device: torch.device) -> KernelCase:
    num_bytes = tokens * shape.hidden * 4 * shape.dtype.itemsize
    count = copies(num_bytes, shape.rotate_bytes)
    x, delta = (_random(shape, device, count, tokens, shape.hidden) for _ in range(2))
    weight = torch.rand(shape.hidden, device=device) + 0.5

    def check() -> str:
        total, normed = backend.add_rms_norm(x[0], delta[0], weight, EPS)
        expected = x[0].double() + delta[0].double()
        # The sum is rounded before it is normed.
        pairs = [
            ("sum", total, expected),
            ("norm of the sum", normed, reference.rms_norm(total.double(), weight.double(), EPS)),
            ("norm", backend.rms_norm(x[0], weight, EPS), reference.rms_norm(x[0].double(), weight.double(), EPS)),
        ]
        return first_problem(pairs, shape.dtype)

    calls: list[Call] = [lambda i=i: backend.add_rms_norm(x[i], delta[i], weight, EPS) for i in range(count)]  # type: ignore[misc]
    return KernelCase("add and norm", f"{tokens:,} x {shape.hidden:,}", num_bytes, 0, calls, check)


def gated_case(backend: Any, shape: GPUShape, tokens: int, device: torch.device) -> KernelCase:
    num_bytes = tokens * shape.intermediate * 3 * shape.dtype.itemsize
    count = copies(num_bytes, shape.rotate_bytes)
    x = _random(shape, device, count, tokens, 2 * shape.intermediate)

    def check() -> str:
        names = ("silu", "gelu_tanh")
        pairs = [(name, backend.gated(x[0], name), reference.gated(x[0].double(), name)) for name in names]
        return first_problem(pairs, shape.dtype)

    calls: list[Call] = [lambda i=i: backend.gated(x[i], "silu") for i in range(count)]  # type: ignore[misc]
    return KernelCase("silu x mul", f"{tokens:,} x {shape.intermediate:,}", num_bytes, 0, calls, check)


def sampling_case(backend: Any, shape: GPUShape, device: torch.device, *, greedy: bool) -> KernelCase:
    """The floor reads the logits once."""
    num_draws = max(shape.decode_batches)
    num_bytes = num_draws * shape.vocab_size * 4
    count = copies(num_bytes, shape.rotate_bytes)
    logits = torch.randn(count, num_draws, shape.vocab_size, device=device) * 3
    draws = [Draw() if greedy else Draw(0.8, 50 * (i % 2), 0.9, 0.0, i, 100 + i) for i in range(num_draws)]
    rows = SamplingTensors.pack(draws, device)

    def check() -> str:
        found, expected = backend.sample(logits[0], rows), sample_by_sorting(logits[0], rows)
        different = int((found != expected).sum())
        allowed = 0 if greedy else MAX_DIFFERENT_DRAWS
        return f"{different} of {num_draws} tokens differ" if different > allowed else ""

    calls: list[Call] = [lambda i=i: backend.sample(logits[i], rows) for i in range(count)]  # type: ignore[misc]
    name = "greedy tokens" if greedy else "top-k and top-p"
    return KernelCase(name, f"{num_draws} x {shape.vocab_size:,}", num_bytes, 0, calls, check)


def seats_case(backend: Any, shape: GPUShape, device: torch.device) -> KernelCase:
    """A full decode step's rows from seats; the floor copies the block tables, 8 bytes an entry to 4."""
    count, size = max(shape.decode_batches), shape.block_size
    layout = SeatLayout(count, shape.decode_context // size + 1, size)
    memory = random_seats(layout, range(count), [shape.decode_context - 1] * count, torch.Generator().manual_seed(1))
    sampled = torch.arange(count) % shape.vocab_size
    memory, sampled = memory.to(device), sampled.to(device)
    rows = unwritten_rows(layout, count, device)

    def check() -> str:
        found = seats_check(backend.fill_rows, size, shape.decode_context, device, torch.Generator().manual_seed(2))
        return found.problem

    def call() -> None:
        memory[count:].view(count, -1)[:, POSITION] = shape.decode_context - 1  # it moves on each time
        backend.fill_rows(memory, layout, sampled, shape.vocab_size, rows)

    num_bytes = 12 * count * (shape.decode_context // size)
    return KernelCase("rows from seats", f"{count} of {shape.decode_context:,}", num_bytes, 0, [call], check)


def sums_case(backend: Any, shape: GPUShape, device: torch.device) -> KernelCase:
    """The sums that tell a receiver's GPU whether it copied what the sender's read."""
    count = shape.moved_blocks
    kv = _random(shape, device, count, shape.num_layers, shape.num_kv_heads, shape.block_size, 2, shape.head_dim)
    ids = torch.randperm(count, device=device)
    sums, expected = torch.zeros_like(ids), torch.zeros_like(ids)

    def check() -> str:
        backend.block_sums(kv, ids, sums)
        sums_by_torch(kv, ids, expected)
        return "" if torch.equal(sums, expected) else "the sums differ from torch's"

    call: Call = lambda: backend.block_sums(kv, ids, sums)  # noqa: E731
    return KernelCase("sums of blocks", f"{count} blocks of {kv[0].nbytes:,} bytes", kv.nbytes, 0, [call], check)


def block_case(backend: Any, shape: GPUShape, device: torch.device, *, quantised: bool, gathers: bool) -> KernelCase:
    """Blocks to a transfer buffer, or back, native or as 8-bit numbers."""
    count = shape.moved_blocks
    block = (shape.num_layers, shape.num_kv_heads, shape.block_size, 2, shape.head_dim)
    kv = _random(shape, device, count * 2, *block)
    ids = torch.randperm(count * 2, device=device)[:count]
    width = wire_bytes(kv, quantised=quantised)
    buffer = torch.zeros(count, width, dtype=torch.uint8, device=device)
    num_bytes = count * (kv[0].nbytes + width)
    label = ("8-bit " if quantised else "") + f"{count} blocks of {kv[0].nbytes:,} bytes"

    def check_gather() -> str:
        expected = torch.zeros_like(buffer)
        gather_by_torch(kv, ids, expected, quantised)
        backend.gather_blocks(kv, ids, buffer.zero_(), quantised)
        return "" if torch.equal(buffer, expected) else "the bytes differ from those that torch writes"

    def check_scatter() -> str:
        gather_by_torch(kv, ids, buffer, quantised)
        found, expected = torch.full_like(kv, float("nan")), torch.full_like(kv, float("nan"))
        backend.scatter_blocks(buffer, found, ids, quantised)
        scatter_by_torch(buffer, expected, ids, quantised)
        if not torch.equal(torch.isnan(found), torch.isnan(expected)):
            return "blocks were written that should not be"
        return difference(found.nan_to_num(), expected.nan_to_num(), shape.dtype)

    gather: Call = lambda: backend.gather_blocks(kv, ids, buffer, quantised)  # noqa: E731
    scatter: Call = lambda: backend.scatter_blocks(buffer, kv, ids, quantised)  # noqa: E731
    if gathers:
        return KernelCase("gather blocks", label, num_bytes, 0, [gather], check_gather)
    return KernelCase("scatter blocks", label, num_bytes, 0, [scatter], check_scatter)


def _random(shape: GPUShape, device: torch.device, *sizes: int) -> Tensor:
    return torch.randn(*sizes, device=device).to(shape.dtype)
