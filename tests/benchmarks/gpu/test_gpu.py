"""What the GPU benchmark measures with: its gate sees what is wrong, its peers compute the same."""

from __future__ import annotations

import faulthandler
import os
import signal
import time

import pytest
import torch

from benchmarks.gpu import report
from benchmarks.gpu.attention import PagedInputs, _sdpa_calls
from benchmarks.gpu.case import words_of
from benchmarks.gpu.chip import Chip, numbered
from benchmarks.gpu.gate import difference, poisoned
from benchmarks.gpu.held import scaled_calls
from benchmarks.gpu.shape import DRY, LLAMA_8B
from benchmarks.time_limit import TimeOver, time_limit


def test_a_limit_comes_and_goes_with_its_block() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(TimeOver, match="the limit of 0.01 s"), time_limit(0.01):
        time.sleep(60)
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_starts_the_deadline_of_the_clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[float] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, exit, file: deadlines.append(seconds))
    with pytest.raises(TimeOver, match="told to end"), time_limit(0.0, grace_s=7.0):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    assert deadlines == [7.0]


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes no device current that has none."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert numbered(torch.device("cuda")) == torch.device("cuda:2")
    assert numbered(torch.device("cuda:1")) == torch.device("cuda:1")


def test_an_error_of_many_lines_is_told_by_its_ends() -> None:
    error = ValueError("at 3:4:\n    x = y\n        ^\ny is not defined\n")
    assert words_of(error) == "ValueError: at 3:4: ... y is not defined"
    assert words_of(KeyError()) == "KeyError: no message"


def test_the_floor_is_the_larger_of_two() -> None:
    chip = Chip("chip", copy_rate=1e12, matmul_rate=1e14)
    assert chip.floor(2e12, 1e14) == pytest.approx(2.0)
    assert chip.floor(1e12, 3e14) == pytest.approx(3.0)


def test_the_gate_sees_numbers_that_are_off_missing_or_misshapen() -> None:
    expected = torch.randn(40, 8, dtype=torch.float64)
    right = expected.float()
    assert difference(right, expected, torch.float32) == ""
    assert difference(right.bfloat16(), expected, torch.bfloat16) == ""
    assert "off by" in difference(right.bfloat16(), expected, torch.float32)
    wrong = right.clone()
    wrong[3, 5] += 0.5
    assert "off by" in difference(wrong, expected, torch.bfloat16)
    wrong[3, 5] = float("nan")
    assert "1 of 320 numbers are not finite" in difference(wrong, expected, torch.float32)
    assert "shape" in difference(right[1:], expected, torch.float32)
    small = expected / 100
    assert difference(small.bfloat16(), small, torch.bfloat16) == ""
    assert "of its norm" in difference(small * 0.9, small, torch.bfloat16)


def test_new_memory_is_poisoned_inside_only() -> None:
    original = torch.empty
    with poisoned():
        assert torch.empty(3, 2).isnan().all() and torch.empty_like(torch.zeros(2)).isnan().all()
        assert torch.empty(2, dtype=torch.int64).dtype == torch.int64
    assert torch.empty is original


def test_the_shapes_are_what_their_configuration_says() -> None:
    assert LLAMA_8B.matrix_elements + LLAMA_8B.vocab_size * LLAMA_8B.hidden == pytest.approx(8.03e9, rel=1e-3)
    assert LLAMA_8B.token_bytes * LLAMA_8B.num_layers * LLAMA_8B.block_size == 8 * 2**20
    assert DRY.config.vocab_size == DRY.hugging_face()["vocab_size"]


def test_a_table_is_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_rows("Steps", [{"how": "recorded", "ms": 1234.5}, {"how": "eager", "ms": 7}])
    assert capsys.readouterr().out == (
        "\nSteps\nhow            ms\n--------  -------\nrecorded  1,234.5\neager           7\n"
    )


def test_torchs_product_of_8_bits_takes_these_inputs() -> None:
    """Its signature differs by version, and no other test calls it at once."""
    (call,) = scaled_calls(torch.randn(4, 64, dtype=torch.bfloat16), 32, 1)
    made = call()
    assert isinstance(made, torch.Tensor) and made.shape == (4, 32) and made.dtype == torch.bfloat16


def test_the_engine_fits_a_large_chip() -> None:
    """KV of the largest step and the weights, in 80 GB."""
    largest = max(rows * context for rows, context in LLAMA_8B.engine_steps)
    kv = largest * LLAMA_8B.token_bytes * LLAMA_8B.num_layers
    assert kv + 2 * LLAMA_8B.matrix_elements < 60e9
    assert {rows for rows, _ in LLAMA_8B.engine_steps} == {1, 8, 32, 64, 256}
    assert LLAMA_8B.engine_prompts == (1024, 8192, 32_768) and LLAMA_8B.max_model_len > 32_768


def test_peers_see_the_keys_of_the_blocks() -> None:
    """torch's attention over what `contiguous` makes of them is the paged one."""
    torch.manual_seed(1)
    inputs = PagedInputs(DRY, [(1, 19)] * 2, 1, torch.device("cpu"))
    (call,) = _sdpa_calls(inputs, causal=False)
    found = call()
    assert isinstance(found, torch.Tensor) and found.isfinite().all() and found.shape == (2, 4, 1, 16)
