"""The plain way to run a model, in code of its own: one sequence, contiguous KV, no blocks, no batch, nothing fused.

Tests compare the serving path with it. It shares with that path the weights, the sampler and the rule when to stop.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from common.engine.models.decoder import Decoder
from common.engine.models.mlp import MLP
from common.engine.models.rope import inverse_frequencies
from common.engine.models.weights import LayerWeights, NormPlace
from common.engine.sampling.sampler import Sampler, SamplingRow
from common.grammar.grammar import Constraint
from common.grammar.token_rules import finish_reason, token_limits
from common.model_files.architecture import RopeConfig
from common.wire.sampling_params import SamplingParams
from kernels import KVScales
from kernels.interface.kv_region import packed, unpacked


def generate(
    model: Decoder,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    eos_token_ids: Collection[int] = (),
    constraint: Constraint | None = None,
    *,
    kv_dtype: torch.dtype | None = None,
    kv_scales: tuple[KVScales, ...] = (),
) -> list[int]:
    """Output tokens, the end token included, of one request."""
    oracle, sampler = _oracle(model, kv_dtype, kv_scales), Sampler(model.config.vocab_size)
    prompt, output = list(prompt_ids), list[int]()
    cache = oracle.empty_cache()
    logits = oracle.forward(prompt, cache)
    while True:
        limits = token_limits(params, eos_token_ids, len(output), output)
        row = SamplingRow(params, len(prompt) + len(output), output, prompt, limits, constraint)
        token_id = sampler.sample(logits[-1:], [row])[0].token_id
        output.append(token_id)
        reason = finish_reason(
            params,
            eos_token_ids,
            num_output_tokens=len(output),
            token_id=token_id,
            num_tokens=len(prompt) + len(output),
            max_model_len=model.config.max_model_len,
        )
        if reason:
            return output
        logits = oracle.forward([token_id], cache)


class Oracle:
    """Dense copies of a model's weights, in `dtype` (default: the model's), and a forward pass over them.

    With a `kv_dtype` keys and values become rows of such a cache before anything looks at them, divided by the
    `kv_scales` of each layer, if any.
    """

    def __init__(
        self,
        model: Decoder,
        dtype: torch.dtype | None = None,
        *,
        kv_dtype: torch.dtype | None = None,
        kv_scales: Sequence[KVScales] = (),
    ) -> None:
        self.config, self.model, self.kv_dtype, self.kv_scales = model.config, model, kv_dtype, kv_scales
        self.dtype = dtype or model.dtype
        weights = model.weights
        self.embedding, self.head = weights.embedding.weight.to(self.dtype), weights.lm_head.weight.to(self.dtype)
        self.matrices = [
            tuple(linear.weight.to(self.dtype) for linear in (layer.qkv, layer.output, mlp.gate_up, mlp.down))
            for layer, mlp in ((layer, _dense(layer)) for layer in weights.layers)
        ]

    def empty_cache(self) -> list[Tensor]:
        """Per layer the keys and values so far: [2, num_tokens, num_kv_heads, head_dim]."""
        shape = (2, 0, self.config.num_kv_heads, self.config.head_dim)
        return [torch.empty(shape, dtype=self.dtype) for _ in self.matrices]

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], cache: list[Tensor]) -> Tensor:
        """Logits [len(token_ids), vocab_size] after each of the tokens, which are appended to `cache`."""
        config, weights = self.config, self.model.weights
        x = self.embedding[torch.tensor(token_ids)]
        if config.embedding_scale != 1.0:
            x = x * torch.tensor(config.embedding_scale, dtype=self.dtype)
        rules = _PositionRules(self, start=cache[0].shape[1], num_queries=len(token_ids))
        for index, layer in enumerate(weights.layers):
            x = self._layer(index, layer, x, cache, rules)
        logits = self._norm(x, weights.norm) @ self.head.T
        logits = logits.double() if self.dtype == torch.float64 else logits.float()
        return config.final_softcap * torch.tanh(logits / config.final_softcap) if config.final_softcap else logits

    def _layer(self, index: int, layer: LayerWeights, x: Tensor, cache: list[Tensor], rules: _PositionRules) -> Tensor:
        _, output, gate_up, down = self.matrices[index]
        mixed = self._attention(index, layer, self._normed(x, layer, "before_attention"), cache, rules) @ output.T
        mixed = mixed if layer.output.bias is None else mixed + layer.output.bias
        x = x + self._normed(mixed, layer, "after_attention")
        inner = self._normed(x, layer, "before_mlp") @ gate_up.T
        inner = inner if _dense(layer).gate_up.bias is None else inner + _dense(layer).gate_up.bias
        gate, up = inner.chunk(2, dim=-1)
        silu = self.config.activation == "silu"
        act = functional.silu(gate) if silu else functional.gelu(gate, approximate="tanh")
        change = (act * up) @ down.T
        change = change if _dense(layer).down.bias is None else change + _dense(layer).down.bias
        return x + self._normed(change, layer, "after_mlp")

    def _normed(self, x: Tensor, layer: LayerWeights, place: NormPlace) -> Tensor:
        """`x` where the family has no norm in that place."""
        return self._norm(x, layer.norms[place]) if place in layer.norms else x

    def _attention(
        self, index: int, layer: LayerWeights, x: Tensor, cache: list[Tensor], rules: _PositionRules
    ) -> Tensor:
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = x @ self.matrices[index][0].T
        qkv = qkv if layer.qkv.bias is None else qkv + layer.qkv.bias
        qkv = qkv.view(len(x), -1, config.head_dim)
        q, k, v = qkv[:, :heads], qkv[:, heads:-kv_heads], qkv[:, -kv_heads:]
        q = q if layer.q_norm is None else self._norm(q, layer.q_norm)
        k = k if layer.k_norm is None else self._norm(k, layer.k_norm)
        rotation = rules.rotation(config.layer_ropes[index])
        q, k = _rotate(q, *rotation), _rotate(k, *rotation)
        new = torch.stack((k, v))
        if self.kv_dtype is not None:
            both = new.float().permute(2, 1, 0, 3)  # [Hkv, T, 2, D]
            scales = torch.tensor(self.kv_scales[index] if self.kv_scales else (1.0, 1.0))[:, None]
            held = unpacked(packed(both / scales, self.kv_dtype)) * scales
            new = held.permute(2, 1, 0, 3).to(self.dtype)
        cache[index] = torch.cat((cache[index], new), dim=1)
        keys, values = (part.repeat_interleave(heads // kv_heads, dim=1) for part in cache[index])
        scores = q.transpose(0, 1) @ keys.permute(1, 2, 0) * config.attention_scale  # [heads, queries, keys]
        if config.attention_softcap:
            scores = config.attention_softcap * torch.tanh(scores / config.attention_softcap)
        scores = scores.masked_fill(rules.hidden(config.layer_windows[index]), -torch.inf)
        weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(self.dtype, torch.float32)).to(self.dtype)
        return (weights @ values.transpose(0, 1)).transpose(0, 1).reshape(len(x), -1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (scaled * weight).to(x.dtype)


@functools.lru_cache(maxsize=2)
def _oracle(model: Decoder, kv_dtype: torch.dtype | None, kv_scales: tuple[KVScales, ...]) -> Oracle:
    return Oracle(model, kv_dtype=kv_dtype, kv_scales=kv_scales)


def _dense(layer: LayerWeights) -> MLP:
    assert isinstance(layer.mlp, MLP), "the oracle has no experts: compare with transformers"
    return layer.mlp


class _PositionRules:
    """Rotations and masks of one forward pass, each computed once for all layers that share it."""

    def __init__(self, oracle: Oracle, start: int, num_queries: int) -> None:
        self._oracle, self._positions = oracle, torch.arange(start, start + num_queries)
        self._rotations: dict[RopeConfig, tuple[Tensor, Tensor]] = {}
        self._hidden: dict[int, Tensor] = {}

    def rotation(self, rope: RopeConfig) -> tuple[Tensor, Tensor]:
        """Cosines and sines: each [queries, 1, head_dim]."""
        if rope not in self._rotations:
            config, dtype = self._oracle.config, self._oracle.dtype
            frequencies = inverse_frequencies(rope, config.head_dim, self._oracle.model.weights.rope_factors)
            angles = (self._positions.float()[:, None] * frequencies).repeat(1, 2)[:, None, :]
            self._rotations[rope] = angles.cos().to(dtype), angles.sin().to(dtype)
        return self._rotations[rope]

    def hidden(self, window: int) -> Tensor:
        """bool [queries, keys]: which keys a query must not see. `window` is in tokens, 0: no limit."""
        if window not in self._hidden:
            num_keys = int(self._positions[-1]) + 1
            distance = self._positions[:, None] - torch.arange(num_keys)[None, :]
            self._hidden[window] = (distance < 0) | (distance >= (window or num_keys + 1))
        return self._hidden[window]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
