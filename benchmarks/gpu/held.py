"""Cases of our products beside cuBLAS: with quantised weights, those of experts, and the batch-invariant ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.attention import copies
from benchmarks.gpu.case import KernelCase, MakeCase
from benchmarks.gpu.gate import difference
from benchmarks.gpu.shape import GPUShape
from benchmarks.gpu.timer import Call
from kernels import QuantisedWeight
from kernels.interface.held_weight import HeldWeight
from kernels.interface.kernels import HeldProducts
from kernels.plain import backend as plain

GROUP = 128
"""Of inputs, as AWQ, GPTQ and DeepSeek's fp8 have them."""
COUNT, PER_TOKEN, SMALL_GROUP = 32, 4, 32
"""gpt-oss-20b's."""
ACTIVATION = "clamped_swiglu"
Stacks = tuple[HeldWeight, HeldWeight]


def held_cases(products: HeldProducts, shape: GPUShape, device: torch.device) -> Iterator[MakeCase]:
    """Of one row, of a batch that reads the quantised weights, and of a prompt, for which they are widened."""
    for bits in (4, 8):
        for rows in (1, max(shape.decode_batches), max(shape.prefill_lengths)):
            yield partial(held_case, products, shape, rows, bits, device)


def held_case(products: HeldProducts, shape: GPUShape, rows: int, bits: int, device: torch.device) -> KernelCase:
    outputs, inputs = 2 * shape.intermediate, shape.hidden
    group = GROUP if inputs % GROUP == 0 else inputs
    weight = held(outputs, inputs, bits, group, device)
    count = copies(weight.num_bytes, shape.rotate_bytes)
    weights = [weight, *(held(outputs, inputs, bits, group, device) for _ in range(count - 1))]
    x = torch.randn(rows, inputs, device=device).to(shape.dtype)

    def check() -> str:
        expected = x.double() @ weight.dense(shape.dtype).double().T
        return difference(products.held_linear(x, weight, None), expected, shape.dtype)

    def dense() -> list[Call]:
        floats = [each.dense(shape.dtype) for each in weights]
        return [lambda one=one: functional.linear(x, one) for one in floats]  # type: ignore[misc]

    calls: list[Call] = [lambda one=one: products.held_linear(x, one, None) for one in weights]  # type: ignore[misc]
    num_bytes = weight.num_bytes + rows * (inputs + outputs) * shape.dtype.itemsize
    name = f"product in {'4 bits' if bits == 4 else 'fp8'}"
    size = f"{rows:,} rows, {outputs:,} x {inputs:,}"
    peers = {"cuBLAS, floats": dense}
    if bits == 8:
        peers["scaled_mm, fp8 inputs"] = lambda: scaled_calls(x, outputs, count)
    return KernelCase(name, size, num_bytes, 2 * rows * outputs * inputs, calls, check, peers)


def scaled_calls(x: Tensor, outputs: int, count: int) -> list[Call]:
    """torch's product of e4m3 numbers with a scale for each row of both. Inputs are rounded to 8 bits in advance."""
    rows, inputs = x.shape
    small = (x / x.abs().amax(1, keepdim=True) * 448).to(torch.float8_e4m3fn)
    of_rows = torch.rand(rows, 1, device=x.device) + 0.5
    of_outputs = torch.rand(1, outputs, device=x.device) + 0.5
    weights = [torch.randn(outputs, inputs, device=x.device).to(torch.float8_e4m3fn).t() for _ in range(count)]
    return [
        lambda one=one: torch._scaled_mm(small, one, of_rows, of_outputs, out_dtype=torch.bfloat16)  # type: ignore[misc]
        for one in weights
    ]


def invariant_cases(products: HeldProducts, shape: GPUShape, device: torch.device) -> Iterator[MakeCase]:
    """Of one row, of a batch, and of a prompt, by a layer's gate and up and by its down."""
    for outputs, inputs in ((2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)):
        for rows in (1, max(shape.decode_batches), max(shape.prefill_lengths)):
            yield partial(invariant_case, products, shape, rows, outputs, inputs, device)


def invariant_case(
    products: HeldProducts, shape: GPUShape, rows: int, outputs: int, inputs: int, device: torch.device
) -> KernelCase:
    count = copies(outputs * inputs * shape.dtype.itemsize, shape.rotate_bytes)
    weights = [torch.randn(outputs, inputs, device=device, dtype=shape.dtype).mul_(inputs**-0.5) for _ in range(count)]
    x = torch.randn(rows, inputs, device=device).to(shape.dtype)

    def check() -> str:
        expected = torch.cat([x.float() @ part.float().T for part in torch.split(weights[0], 4096)], dim=1)
        return difference(products.invariant_linear(x, weights[0], None), expected, shape.dtype)

    calls: list[Call] = [lambda one=one: products.invariant_linear(x, one, None) for one in weights]  # type: ignore[misc]
    dense: list[Call] = [lambda one=one: functional.linear(x, one) for one in weights]  # type: ignore[misc]
    num_bytes = (outputs * inputs + rows * (inputs + outputs)) * shape.dtype.itemsize
    size = f"{rows:,} rows, {outputs:,} x {inputs:,}"
    num_flops = 2 * rows * outputs * inputs
    return KernelCase(
        "batch-invariant product", size, num_bytes, num_flops, calls, check, {"cuBLAS, floats": lambda: dense}
    )


def held(outputs: int, inputs: int, bits: int, group: int, device: torch.device) -> HeldWeight:
    """Random numbers: of 4 bits with zero points, or e4m3 ones."""
    scale = torch.rand(outputs, inputs // group, device=device) + 0.5
    if bits == 4:
        numbers = torch.randint(0, 16, (outputs, inputs), device=device, dtype=torch.int8)
        factors = (scale / 8 / inputs**0.5).half()
        return HeldWeight.of(QuantisedWeight(4, group, numbers, factors, -8 * factors))
    numbers = torch.randint(0, 127, (outputs, inputs), device=device, dtype=torch.uint8)
    return HeldWeight.of(QuantisedWeight(8, group, numbers, scale / 64 / inputs**0.5, None))


def experts_cases(products: HeldProducts, shape: GPUShape, device: torch.device) -> Iterator[MakeCase]:
    """Of one row, which reads a few experts, and of a batch and a prompt, which read all."""
    for rows in (1, max(shape.decode_batches), max(shape.prefill_lengths)):
        yield partial(experts_case, products, shape, rows, device)


def experts_case(products: HeldProducts, shape: GPUShape, rows: int, device: torch.device) -> KernelCase:
    width = shape.hidden  # of hidden states, and of each expert
    stacks = (random_stack(2 * width, width, device), random_stack(width, width, device))
    size = sum(stack.num_bytes for stack in stacks)
    several = [stacks, *(_again(stacks) for _ in range(copies(size, shape.rotate_bytes) - 1))]
    x = torch.randn(rows, width, device=device).to(shape.dtype)
    chosen = (torch.arange(rows * PER_TOKEN, device=device) % COUNT).view(rows, PER_TOKEN)
    shares = torch.full((rows, PER_TOKEN), 1 / PER_TOKEN, device=device)

    def call(weights: tuple[HeldWeight | Tensor, HeldWeight | Tensor]) -> Tensor:
        made: Tensor = products.experts(x, chosen, shares, *weights, None, None, ACTIVATION)
        return made

    def check() -> str:
        return difference(call(stacks), plain_experts(x, chosen, shares, stacks), shape.dtype)

    def dense() -> list[Call]:
        floats = (_floats(stacks[0], shape.dtype), _floats(stacks[1], shape.dtype))
        return [partial(call, floats)]

    used = min(COUNT, rows * PER_TOKEN)
    num_bytes = size * used / COUNT + 2 * rows * width * shape.dtype.itemsize
    words = f"{rows:,} rows, {PER_TOKEN} of {COUNT}, {width:,} wide"
    calls: list[Call] = [partial(call, one) for one in several]
    num_flops = 2 * rows * PER_TOKEN * 3 * width * width
    return KernelCase("experts in 4-bit floats", words, num_bytes, num_flops, calls, check, {"the same, floats": dense})


def dense_experts_cases(products: HeldProducts, shape: GPUShape, device: torch.device) -> Iterator[MakeCase]:
    """Cases of unquantised experts: one row, a batch, and a prompt."""
    for rows in (1, max(shape.decode_batches), max(shape.prefill_lengths)):
        yield partial(dense_experts_case, products, shape, rows, device)


def dense_experts_case(products: HeldProducts, shape: GPUShape, rows: int, device: torch.device) -> KernelCase:
    count, per_token, width, inner = shape.dense_experts
    sizes = ((count, 2 * inner, width), (count, width, inner))
    num_bytes = sum(outputs * inputs for _, outputs, inputs in sizes) * count * shape.dtype.itemsize

    def stack(size: tuple[int, int, int]) -> Tensor:
        return torch.randn(*size, device=device, dtype=shape.dtype).mul_(size[2] ** -0.5)

    several = [(stack(sizes[0]), stack(sizes[1])) for _ in range(copies(num_bytes, shape.rotate_bytes))]
    x = torch.randn(rows, width, device=device).to(shape.dtype)
    chosen = (torch.arange(rows * per_token, device=device) * 7 % count).view(rows, per_token)
    shares = torch.full((rows, per_token), 1 / per_token, device=device)

    def call(gate_up: Tensor, down: Tensor) -> Tensor:
        made: Tensor = products.experts(x, chosen, shares, gate_up, down, None, None, "silu")
        return made

    def check() -> str:
        gate_up, down = several[0]
        expected = torch.zeros(x.shape, dtype=torch.float32, device=device)
        for index in range(count):
            few, places = torch.where(chosen == index)
            if len(few):
                made = plain.gated(x[few].float() @ gate_up[index].float().T, "silu")
                expected.index_add_(0, few, (made @ down[index].float().T) * shares[few, places][:, None])
        return difference(call(gate_up, down), expected, shape.dtype)

    def grouped() -> list[Call]:
        """torch's grouped products over sorted rows. Of all other work, only the gate is included."""
        ranked, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(ranked, torch.arange(count, device=device), right=True, out_int32=True)
        gathered = x[order // per_token].contiguous()

        def run(gate_up: Tensor, down: Tensor) -> Tensor:
            inside = torch._grouped_mm(gathered, gate_up.transpose(1, 2), offs=ends)
            half = inside.shape[1] // 2
            return torch._grouped_mm(
                functional.silu(inside[:, :half]) * inside[:, half:], down.transpose(1, 2), offs=ends
            )

        return [partial(run, *one) for one in several]

    used = min(count, rows * per_token)
    words = f"{rows:,} rows, {per_token} of {count}, {width:,} wide"
    return KernelCase(
        "experts in floats",
        words,
        num_bytes / count * used + 2 * rows * width * shape.dtype.itemsize,
        2 * rows * per_token * 3 * width * inner,
        [partial(call, *one) for one in several],
        check,
        {"grouped_mm": grouped},
    )


def random_stack(outputs: int, inputs: int, device: torch.device) -> HeldWeight:
    def one() -> QuantisedWeight:
        numbers = torch.randint(0, 16, (outputs, inputs), device=device, dtype=torch.uint8)
        scale = torch.full((outputs, inputs // SMALL_GROUP), 2.0**-7, device=device, dtype=torch.bfloat16)
        return QuantisedWeight(4, SMALL_GROUP, numbers, scale, None)

    return HeldWeight.stacked([one() for _ in range(COUNT)])


def plain_experts(x: Tensor, chosen: Tensor, shares: Tensor, stacks: Stacks) -> Tensor:
    """float32, expert by expert, of weights as they are rounded to the type of x."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for index in range(COUNT):
        rows, places = torch.where(chosen == index)
        if len(rows):
            gate_up, down = (stack.part(index).dense(x.dtype).float() for stack in stacks)
            inner = plain.gated(x[rows].float() @ gate_up.T, ACTIVATION)
            out.index_add_(0, rows, (inner @ down.T) * shares[rows, places][:, None])
    return out


def _again(stacks: Stacks) -> Stacks:
    """The same numbers in memory of their own."""
    gate_up, down = (
        HeldWeight(one.numbers.clone(), one.scale.clone(), None, one.group, one.packed, one.floats) for one in stacks
    )
    return gate_up, down


def _floats(stack: HeldWeight, dtype: torch.dtype) -> Tensor:
    return torch.stack([stack.part(i).dense(dtype) for i in range(COUNT)])
