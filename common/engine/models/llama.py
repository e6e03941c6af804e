"""Llama and families with the same layers: Mistral, Qwen, Phi, Granite, SmolLM2 and 3, gpt-oss and others."""

from __future__ import annotations

from torch import Tensor

from common.engine.models.decoder import Decoder, Step
from kernels import add_rms_norm, rms_norm


class Llama(Decoder):
    """Pre-norm: x += attention(norm(x)); x += mlp(norm(x)). Each sum is fused with the next norm."""

    def layers(self, hidden: Tensor, step: Step) -> Tensor:
        eps, layers = self.config.rms_norm_eps, self.weights.layers
        following = [*(layer.norms["before_attention"] for layer in layers[1:]), self.weights.norm]
        step.states.record(0, hidden)
        normed = rms_norm(hidden, layers[0].norms["before_attention"], eps)
        for index, (layer, next_norm) in enumerate(zip(layers, following, strict=True)):
            mixed = self.attention(index, layer, normed, step)
            hidden, normed = add_rms_norm(self.wanted(index, hidden, step), mixed, layer.norms["before_mlp"], eps)
            hidden, normed = add_rms_norm(hidden, self.mlp(index, layer, normed, step), next_norm, eps)
            step.states.record(index + 1, hidden)
        return normed
