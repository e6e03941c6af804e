"""Runs a case of tests/kernels/conftest.py through the GPU's attention, and measures it against the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import AttentionRule
from kernels.gpu import attention
from kernels.gpu.device_plan import GPUPlan
from kernels.plain import reference


def attend(
    case: Any, device: torch.device, plan: GPUPlan | None = None, *, window: int = 0, softcap: float = 0.0, **more: Any
) -> Tensor:
    """Of layer 1, with a plan of its own unless one is given; the result on the CPU."""
    plan = plan or attention.plan_attention(case.spans, case.layout, case.heads, device)
    sinks = more.pop("sinks", None)
    q, kv = case.q.to(device), case.kv.to(device)
    sinks = None if sinks is None else sinks.to(device)
    rule = AttentionRule(case.layout.head_dim**-0.5, window, softcap, sinks, latent_dim=case.layout.latent_dim, **more)
    return attention.paged_attention(q, kv, 1, plan, rule).cpu()


def error(case: Any, out: Tensor, **options: Any) -> float:
    """The largest difference from the reference; NaN if a row of a span is unwritten."""
    scale = case.layout.head_dim**-0.5
    options["latent_dim"] = case.layout.latent_dim
    expected = reference.paged_attention(case.q.double(), case.kv, 1, case.spans, scale=scale, **options)
    return float((out.double() - expected).abs().max())
