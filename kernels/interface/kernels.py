"""The operations that a device's backend implements, with their shapes: the one description of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.interface.attention_plan import AttentionPlan, KVLayout, QuerySpan, StepPlan
from kernels.interface.draws import SamplingTensors
from kernels.interface.held_weight import HeldWeight
from kernels.interface.lora import GroupedRows, LoraStack
from kernels.interface.routing import Routing
from kernels.interface.seats import SeatLayout, StepRows


class AttentionRule(NamedTuple):
    """How attention scores become weights of values.

    Scores are q.k * scale, then softcap * tanh(scores / softcap) when `softcap` > 0. `window` > 0 lets a query see that
    many tokens, itself included. `sinks` (float32 [num_heads]) are one more logit a head in the softmax's denominator.
    A cache of float8_e4m3fn holds keys divided by `k_scale` and values divided by `v_scale`. With `latent_dim` the
    cache holds keys alone, whose first `latent_dim` numbers are their values. With `batch_invariant` a row's bits do
    not depend on how a prompt is cut into chunks of several rows.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    latent_dim: int = 0
    batch_invariant: bool = False


class KVScales(NamedTuple):
    """What one layer's keys and values are divided by before a cache of float8_e4m3fn rounds them.

    Latents, which are keys and values, are divided by `key`.
    """

    key: float = 1.0
    value: float = 1.0


UNSCALED: Final = KVScales()


class HeadNorms(NamedTuple):
    """RMS norms of each query and each key head: weights float32 [head_dim]. Weights [heads * head_dim] normalise all
    heads as one."""

    query: Tensor
    key: Tensor
    eps: float


class LatentNorm(NamedTuple):
    """RMS norm of latents: weight float32 [rank]."""

    weight: Tensor
    eps: float


class Kernels(Protocol):
    """The backend of a device type. T counts the step's tokens; see `kernels` for the shape of a KV cache."""

    def plan_attention(
        self, spans: Sequence[QuerySpan], layout: KVLayout, num_heads: int, device: torch.device
    ) -> AttentionPlan:
        """What all layers' attention of one step shares. Spans must not overlap; block tables must be long enough."""
        ...

    def step_plan(
        self, num_rows: int, max_blocks: int, layout: KVLayout, num_heads: int, device: torch.device
    ) -> StepPlan:
        """For a recorded step of up to `num_rows` sequences of up to `max_blocks` blocks; all padding yet."""
        ...

    def fill_rows(self, memory: Tensor, layout: SeatLayout, sampled: Tensor, vocab_size: int, rows: StepRows) -> None:
        """Writes `rows` from where their sequences sit, and moves the seats on: see `kernels.interface.seats`."""
        ...

    def paged_attention(self, q: Tensor, kv: Tensor, layer: int, plan: AttentionPlan, rule: AttentionRule) -> Tensor:
        """Causal attention of q [T, num_heads, head_dim] over the blocks of `layer` in kv: [T, num_heads, head_dim],
        over latents [T, num_heads, latent_dim].

        Query head h reads KV head h // (num_heads // num_kv_heads). The keys and values of the plan's spans must have
        been written; rows outside of the spans stay unwritten. A cache of int8, on a CPU alone, has a scale for each
        key and value (`interface.kv_region`). TypeError for a plan of another backend.
        """
        ...

    def rotate_and_write(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv: Tensor,
        layer: int,
        slots: Tensor,
        norms: HeadNorms | None,
        scales: KVScales = UNSCALED,
    ) -> Tensor:
        """Rotates queries and keys, writes keys and values into the cache, returns q [T, num_heads, head_dim].

        qkv [T, (num_heads + 2 * num_kv_heads) * head_dim]; cos and sin float32 [T, head_dim / 2] rotate element i with
        element i + head_dim / 2; slots int64 [T] are block * block_size + offset. `norms` normalise each head first. A
        cache of float8_e4m3fn takes keys and values, divided by `scales`, to the nearest, at most 448, one of int8 to
        the nearest of 255 multiples of a scale for each; NaN stays NaN. Other caches have no `scales`.
        """
        ...

    def write_latents(
        self,
        q: Tensor,
        absorbed: Tensor,
        latents: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv: Tensor,
        layer: int,
        slots: Tensor,
        norm: LatentNorm,
        scale: float = 1.0,
    ) -> Tensor:
        """Normalises and rotates latents, writes them into the cache, returns queries [T, num_heads, rank + rope].

        latents [T, rank + rope]: the first `rank` numbers are normalised, the others rotated, as `rotate_and_write`
        does, by cos and sin float32 [T, rope / 2]; a cache of float8_e4m3fn takes them divided by `scale`.
        absorbed [T, num_heads * rank] is what the queries' parts without rotation became; behind it come the rotated
        last `rope` numbers of each head of q [T, num_heads * n].
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32; the result has x's dtype."""
        ...

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + delta, rms_norm(x + delta)): the residual and the next block's input, in one pass."""
        ...

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up of [T, 2 * n], gate first: [T, n]. `activation` is "silu", "gelu_tanh" or
        "clamped_swiglu": gate at most 7, up within 7, gate * sigmoid(1.702 gate) * (up + 1)."""
        ...

    def sample(
        self, logits: Tensor | Sequence[Tensor], rows: SamplingTensors, allowed: Sequence[Tensor | None]
    ) -> Tensor:
        """Token ids int64 [n] of logits float32, n rows [vocab], and as many masks: see `kernels.sample`."""
        ...

    def route(self, logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """The experts of each row of logits, and their shares: see `kernels.route`."""
        ...

    def combine(self, made: Tensor, places: Tensor, shares: Tensor) -> Tensor:
        """Sums of rows of made [T * k, width], which places int64 [T, k] names, by shares float32 [T, k]."""
        ...

    def add_gated(self, x: Tensor, other: Tensor, gates: Tensor | None) -> Tensor:
        """x + other * sigmoid(gates) of [T, width] and gates float32 [T, 1]; without gates x + other."""
        ...

    def gather_blocks(self, kv: Tensor, block_ids: Tensor, buffer: Tensor, quantised: bool) -> None:
        """Copies blocks to `buffer`, uint8 [n, wire_bytes]: see `kernels.gather_blocks`."""
        ...

    def scatter_blocks(self, buffer: Tensor, kv: Tensor, block_ids: Tensor, quantised: bool) -> None:
        """Copies rows of `buffer` to blocks: see `kernels.scatter_blocks`."""
        ...

    def block_sums(self, kv: Tensor, block_ids: Tensor, out: Tensor) -> None:
        """Sums of blocks to `out`, int64 [n]: see `kernels.block_sums`."""
        ...


class HeldProducts(Protocol):
    """Products of a device with weights as they are held: quantised ones, stacks of them, and those of adapters."""

    def experts(
        self,
        x: Tensor,
        chosen: Tensor,
        shares: Tensor,
        gate_up: Tensor | HeldWeight,
        down: Tensor | HeldWeight,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        activation: str,
        batch_invariant: bool = False,
    ) -> Tensor:
        """As `kernels.Experts`: gate_up [experts, 2 * inner, hidden] and down [experts, hidden, inner], contiguous,
        or stacks of quantised matrices, which are rounded to the type of x. `batch_invariant`: as `invariant_linear`.
        """
        ...

    def held_linear(self, x: Tensor, weight: HeldWeight, bias: Tensor | None, *, wide: bool = False) -> Tensor:
        """x [T, in] by the transpose of W, plus bias: [T, out], float32 when `wide`. W is rounded to the type of x."""
        ...

    def invariant_linear(
        self, x: Tensor, weight: Tensor | HeldWeight, bias: Tensor | None, *, wide: bool = False
    ) -> Tensor:
        """As `held_linear`, also of floats; a row's bits depend on no other row, nor on how many there are.

        Of W [heads, out, in] without bias, each head's columns of x [T, heads * n] by its own matrix, the first `in` of
        them: [T, heads * out].
        """
        ...

    def add_lora(
        self, x: Tensor, y: Tensor, stack: LoraStack, rows: GroupedRows, *, batch_invariant: bool = False
    ) -> None:
        """Adds to y [T, out], in place, what the rows' adapters make of x [T, in]; both contiguous."""
        ...
