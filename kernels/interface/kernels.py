"""Interfaces of a device backend: operations, shapes and semantics."""

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
    many tokens, itself included. `sinks` (float32 [num_heads]) add one logit per head to the softmax denominator.
    A cache of float8_e4m3fn stores keys divided by `k_scale` and values divided by `v_scale`. With `latent_dim`, the
    cache stores only keys; the first `latent_dim` elements of a key are its value. With `batch_invariant`, results are
    bitwise independent of how a prompt is split into chunks of several rows.
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
    """Divisors of one layer's keys and values in a float8_e4m3fn cache. Latents use `key`."""

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
        """Build the attention plan of a step, shared by all layers. Spans must not overlap; block tables must cover
        every span."""
        ...

    def step_plan(
        self, num_rows: int, max_blocks: int, layout: KVLayout, num_heads: int, device: torch.device
    ) -> StepPlan:
        """Create the plan of a recorded step for up to `num_rows` sequences of up to `max_blocks` blocks. All rows are
        initially padding."""
        ...

    def fill_rows(self, memory: Tensor, layout: SeatLayout, sampled: Tensor, vocab_size: int, rows: StepRows) -> None:
        """Fill `rows` from the seats and advance the seats: see `kernels.interface.seats`."""
        ...

    def paged_attention(self, q: Tensor, kv: Tensor, layer: int, plan: AttentionPlan, rule: AttentionRule) -> Tensor:
        """Causal attention of q [T, num_heads, head_dim] over the blocks of `layer` in kv: [T, num_heads, head_dim],
        over latents [T, num_heads, latent_dim].

        Query head h reads KV head h // (num_heads // num_kv_heads). The keys and values of the plan's spans must have
        been written; rows outside of the spans stay unwritten. An int8 cache, supported on CPUs only, has a scale for
        each key and value (`interface.kv_region`). Raises TypeError for a plan of another backend.
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
        """Rotate queries and keys, write keys and values to the cache, and return q [T, num_heads, head_dim].

        qkv [T, (num_heads + 2 * num_kv_heads) * head_dim]; cos and sin float32 [T, head_dim / 2] rotate element i with
        element i + head_dim / 2; slots int64 [T] are block * block_size + offset. `norms` normalise each head first.

        In a float8_e4m3fn cache, keys and values are divided by `scales`, saturated to 448 and rounded to nearest. In
        an int8 cache, each key and value has a scale and is rounded to one of its 255 multiples. NaN is preserved.
        Other caches do not use `scales`.
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
        """Normalise and rotate latents, write them to the cache, and return queries [T, num_heads, rank + rope].

        latents [T, rank + rope]: the first `rank` elements are normalised. The others are rotated as in
        `rotate_and_write`, with cos and sin float32 [T, rope / 2]. In a float8_e4m3fn cache, latents are divided by
        `scale`.

        A head's query consists of its non-rotary part, projected to latents, in absorbed [T, num_heads * rank],
        followed by the rotated last `rope` elements of the head in q [T, num_heads * n].
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
        """Sample token ids, int64 [n], from `n` rows of logits, float32 [vocab], with one mask each: see
        `kernels.sample`."""
        ...

    def route(self, logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Select the experts of each row and their weights: see `kernels.route`."""
        ...

    def combine(self, made: Tensor, places: Tensor, shares: Tensor) -> Tensor:
        """Sum rows of made [T * k, width] at indices places int64 [T, k], weighted by shares float32 [T, k]."""
        ...

    def add_gated(self, x: Tensor, other: Tensor, gates: Tensor | None) -> Tensor:
        """Return x + other * sigmoid(gates), or x + other without gates. x, other [T, width]; gates float32 [T, 1]."""
        ...

    def gather_blocks(self, kv: Tensor, block_ids: Tensor, buffer: Tensor, quantised: bool) -> None:
        """Copy blocks to `buffer`, uint8 [n, wire_bytes]: see `kernels.gather_blocks`."""
        ...

    def scatter_blocks(self, buffer: Tensor, kv: Tensor, block_ids: Tensor, quantised: bool) -> None:
        """Copy rows of `buffer` to blocks: see `kernels.scatter_blocks`."""
        ...

    def block_sums(self, kv: Tensor, block_ids: Tensor, out: Tensor) -> None:
        """Write the sums of blocks to `out`, int64 [n]: see `kernels.block_sums`."""
        ...


class HeldProducts(Protocol):
    """Device products with weights in their stored form: quantised weights, experts, and adapters."""

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
        """Compute `kernels.Experts`.

        gate_up [experts, 2 * inner, hidden] and down [experts, hidden, inner] are contiguous, or stacks of quantised
        matrices that are rounded to the type of x. `batch_invariant` as in `invariant_linear`.
        """
        ...

    def held_linear(self, x: Tensor, weight: HeldWeight, bias: Tensor | None, *, wide: bool = False) -> Tensor:
        """Return x W^T + bias, [T, out], for x [T, in]; float32 if `wide`. W is rounded to the type of x."""
        ...

    def invariant_linear(
        self, x: Tensor, weight: Tensor | HeldWeight, bias: Tensor | None, *, wide: bool = False
    ) -> Tensor:
        """Like `held_linear`, but results are bitwise independent of the batch. Also accepts float weights.

        If W is [heads, out, in], each head multiplies the first `in` of its n columns of x [T, heads * n] by its own
        matrix: [T, heads * out], without bias.
        """
        ...

    def add_lora(
        self, x: Tensor, y: Tensor, stack: LoraStack, rows: GroupedRows, *, batch_invariant: bool = False
    ) -> None:
        """Add the adapter products of x [T, in] to y [T, out] in place. Both must be contiguous."""
        ...
