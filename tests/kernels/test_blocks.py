from __future__ import annotations

import math
import struct

import pytest
import torch

from kernels import block_sums, gather_blocks, scatter_blocks, wire_bytes
from kernels.plain.blocks import _pieces

SHAPE = (7, 2, 3, 16, 2, 80)
IDS = torch.tensor([5, 0, 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_there_and_back(dtype: torch.dtype) -> None:
    kv, other = torch.randn(SHAPE).to(dtype), torch.zeros(SHAPE).to(dtype)
    buffer = gather_blocks(kv, IDS)
    assert bytes(buffer[1].tolist()) == bytes(kv[0].flatten().view(torch.uint8).tolist())
    scatter_blocks(buffer, other, IDS.flip(0))
    assert torch.equal(other[IDS.flip(0)].float(), kv[IDS].float()) and not other[[1, 2, 4, 6]].float().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantised_numbers_are_near(dtype: torch.dtype) -> None:
    """Half a step of 3 bits of mantissa, or of the least number, 2^-9, with the head's scale; and the dtype's own."""
    about, g = torch.finfo(dtype), torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.randint(-3, 3, (*SHAPE[:3], 1, 2, 1), generator=g)
    kv = (torch.randn(SHAPE, generator=g) * sizes).to(dtype)
    buffer = gather_blocks(kv, IDS, quantised=True)
    assert buffer.shape == (3, wire_bytes(kv, quantised=True)) == (3, 2 * 3 * (16 * 2 * 80 + 2 * 4))
    back = torch.zeros_like(kv)
    scatter_blocks(buffer, back, IDS, quantised=True)
    x, y = kv[IDS].double(), back[IDS].double()
    step = x.abs().amax((3, 5), keepdim=True) / 448 * 2**-10
    allowed = torch.maximum(x.abs() * 2**-4, step) * (1.001 + 2 * about.eps * 16) + about.tiny * about.eps
    assert ((x - y).abs() <= allowed).all()


@pytest.mark.parametrize("value", [0.0, 1e-38, 3e38, -3e38])
def test_extreme_blocks(value: float) -> None:
    kv, back = torch.full(SHAPE, value), torch.full(SHAPE, float("nan"))
    scatter_blocks(gather_blocks(kv, IDS, quantised=True), back, IDS, quantised=True)
    torch.testing.assert_close(back[IDS], kv[IDS], rtol=1e-6, atol=1e-30)


def test_rows_are_aligned() -> None:
    kv = torch.zeros(2, 1, 1, 16, 2, 24)
    assert wire_bytes(kv) == math.prod(kv.shape[1:]) * 4
    buffer = gather_blocks(kv, IDS[1:2], quantised=True)
    assert buffer.shape[1] == 16 * 2 * 24 + 16 and not buffer[:, -8:].any()


def test_a_buffer_of_the_callers() -> None:
    kv = torch.randn(SHAPE)
    out = torch.empty(3, wire_bytes(kv), dtype=torch.uint8)
    assert gather_blocks(kv, IDS, out=out) is out
    assert torch.equal(out, gather_blocks(kv, IDS))


def test_what_does_not_fit() -> None:
    kv = torch.zeros(SHAPE)
    with pytest.raises(ValueError, match="expected contiguous uint8"):
        gather_blocks(kv, IDS, out=torch.empty(2, wire_bytes(kv), dtype=torch.uint8))
    with pytest.raises(ValueError, match="expected contiguous uint8"):
        scatter_blocks(torch.empty(3, wire_bytes(kv) - 4, dtype=torch.uint8), kv, IDS)
    with pytest.raises(ValueError, match="not quantised"):
        gather_blocks(kv.to(torch.float8_e4m3fn), IDS, quantised=True)


def test_heads_larger_than_torch_handles_in_one_thread() -> None:
    kv = torch.randn(3, 2, 2, 128, 2, 256)
    kv[1, 1, 1, 127, 1, 255] = 100.0  # the last number of the last piece
    buffer, back = gather_blocks(kv, IDS[2:] - 2, quantised=True), torch.zeros_like(kv)
    scales = buffer[0, kv[0].numel() :].clone().view(torch.float32)
    torch.testing.assert_close(scales.view(2, 2, 2) * 448, kv[1].abs().amax((2, 4)))
    scatter_blocks(buffer, back, IDS[2:] - 2, quantised=True)
    assert back[1, 1, 1, 127, 1, 255] == pytest.approx(100.0) and not back[0].any()
    assert ((kv[1] - back[1]).abs() <= torch.maximum(kv[1].abs() * 0.063, torch.tensor(100 / 448 * 2**-10))).all()
    for shape in (SHAPE, kv.shape, (1, 30, 3, 16, 2, 64)):
        block = torch.zeros(1, shape[1] * shape[2], *shape[3:])
        pieces = [block[0][piece].numel() for piece in _pieces(block)]
        assert max(pieces) < 32_768 and sum(pieces) == block.numel()


def mixed(block: bytes) -> int:
    """The sum of a block, number by number."""
    total = 0
    for place, (word,) in enumerate(struct.iter_unpack("<Q", block), 1):
        x = (word + place * 0x9E3779B97F4A7C15) % 2**64
        for _ in range(2):
            x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 % 2**64
        total += x ^ x >> 32
    return total % 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_sums_are_of_every_word_and_its_place(dtype: torch.dtype) -> None:
    kv = torch.randn(7, 2, 1, 16, 2, 24).to(dtype)
    kv[3] = 0.0
    found = [value % 2**64 for value in block_sums(kv, torch.tensor([5, 3, 5])).tolist()]
    assert found == [mixed(bytes(kv[index].flatten().view(torch.uint8).tolist())) for index in (5, 3, 5)]


def test_any_bit_changes_a_sum() -> None:
    kv = torch.randn(1, 1, 2, 4, 2, 8)
    only, words = torch.tensor([0]), kv.view(torch.int64).view(-1)
    sums = {int(block_sums(kv, only))}
    for word in range(len(words)):
        for bit in (0, 31, 32, 63):
            words[word] ^= -(2**63) if bit == 63 else 1 << bit
            sums.add(int(block_sums(kv, only)))
            words[word] ^= -(2**63) if bit == 63 else 1 << bit
    assert len(sums) == 1 + 4 * len(words)
    words[[0, 1]] = words[[1, 0]]
    assert int(block_sums(kv, only)) not in sums


def test_a_block_of_no_whole_number_of_words() -> None:
    with pytest.raises(ValueError, match="4 bytes is no whole number of words of 8"):
        block_sums(torch.zeros(2, 1, 1, 1, 1, 1), torch.tensor([0]))
