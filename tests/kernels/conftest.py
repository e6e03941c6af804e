"""Random caches with NaN wherever nothing was written, and every backend that runs here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import AttentionRule, Kernels, KVLayout, QuerySpan
from kernels.cpu.backend import native_backend
from kernels.plain import backend as torch_backend


@pytest.fixture(params=["torch", "native"])
def each_backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "torch":
        return torch_backend
    return native_backend() or pytest.skip("no C++ compiler here")


@pytest.fixture
def native() -> Kernels:
    return native_backend() or pytest.skip("no C++ compiler here")


@pytest.fixture(autouse=True)
def nan_in_new_memory() -> Iterator[None]:
    """`torch.empty` yields NaN, so that an output which is not written is seen."""
    deterministic, fill = (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill


class Case:
    """A cache, the spans of a step, and its queries. `spans` are (tokens in this step, tokens before it).

    `latent_dim`: of keys that are values too, which the cache then holds alone.
    """

    def __init__(
        self, spans: list[tuple[int, int]], *, heads: int = 4, kv_heads: int = 2, dim: int = 64, block: int = 16,
        dtype: torch.dtype = torch.float32, layers: int = 2, extra_blocks: int = 3, seed: int = 0,
        latent_dim: int = 0,
    ) -> None:  # fmt: skip
        random = torch.Generator().manual_seed(seed)
        needed = [-(-(count + start) // block) for count, start in spans]
        total = sum(needed) + extra_blocks
        free = torch.randperm(total, generator=random).tolist()
        self.layout = KVLayout(total, layers, kv_heads, block, dim, latent_dim)
        parts = 1 if latent_dim else 2
        self.heads, self.spans = heads, list[QuerySpan]()
        self.kv = torch.full((total, layers, kv_heads, block, parts, dim), float("nan"), dtype=dtype)
        rows = 0
        for (count, start), blocks in zip(spans, needed, strict=True):
            table = [free.pop() for _ in range(blocks)]
            for i in range(count + start):
                value = torch.randn(layers, kv_heads, parts, dim, generator=random)
                self.kv[table[i // block], :, :, i % block] = value.to(dtype)
            self.spans.append(QuerySpan(rows, count, start, [*table, *free[:2]]))
            rows += count
        self.q = torch.randn(rows, heads, dim, generator=random).to(dtype)

    def run(
        self, backend: Any, layer: int = 1, *, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None,
        k_scale: float = 1.0, v_scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        plan = backend.plan_attention(self.spans, self.layout, self.heads, torch.device("cpu"))
        scale, latent_dim = self.layout.head_dim**-0.5, self.layout.latent_dim
        rule = AttentionRule(scale, window, softcap, sinks, k_scale, v_scale, latent_dim)
        out: Tensor = backend.paged_attention(self.q, self.kv, layer, plan, rule)
        return out


@pytest.fixture
def make_case() -> Callable[..., Case]:
    return Case
