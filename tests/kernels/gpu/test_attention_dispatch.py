"""Sinks and float8 caches through the public functions on the CPU, whatever backend made the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernels
from kernels.backends import FOUND
from kernels.cpu.backend import native_backend
from kernels.plain import backend as torch_backend
from kernels.plain import reference

pytestmark = pytest.mark.cpu
SPANS = [(1, 40), (13, 5), (1, 0), (20, 0), (1, 90), (1, 41)]
OPTIONS: list[dict[str, Any]] = [
    {"sinks": torch.tensor([-3.0, 0.0, 2.0, 30.0])},
    {"sinks": torch.tensor([1.0, 0.0, 2.0, 3.0]), "window": 9, "softcap": 3.0},
    {"k_scale": 0.5, "v_scale": 3.0},
]


@pytest.fixture(params=["torch", "native"], autouse=True)
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setitem(FOUND, "cpu", torch_backend)
    elif native_backend() is None:
        pytest.skip("no C++ compiler here")


def worst(case: Any, **options: Any) -> float:
    scale = case.layout.head_dim**-0.5
    plan = kernels.plan_attention(case.spans, case.layout, case.heads, torch.device("cpu"))
    out = kernels.paged_attention(case.q, case.kv, 1, plan, scale=scale, **options)
    expected = reference.paged_attention(case.q.double(), case.kv, 1, case.spans, scale=scale, **options)
    return float((out.double() - expected).abs().max())


@pytest.mark.parametrize("options", OPTIONS)
def test_features(make_case: Any, options: dict[str, Any]) -> None:
    assert worst(make_case(SPANS), **options) < 5e-6


@pytest.mark.parametrize("options", [{}, *OPTIONS])
def test_float8_cache(make_case: Any, options: dict[str, Any]) -> None:
    case = make_case(SPANS)
    case.kv = case.kv.to(torch.float8_e4m3fn)
    assert worst(case, **options) < 5e-6


def test_sinks_take_weight_from_the_values(make_case: Any) -> None:
    case = make_case([(1, 0)])
    plan = kernels.plan_attention(case.spans, case.layout, case.heads, torch.device("cpu"))
    out = kernels.paged_attention(case.q * 0, case.kv, 1, plan, scale=1.0, sinks=torch.zeros(4))
    value = case.kv[case.spans[0].block_table[0], 1, :, 0, 1].repeat_interleave(2, 0)
    torch.testing.assert_close(out[0], value / 2)
