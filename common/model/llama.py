"""Llama, and the families that differ from it only by biases, q/k norms or windows: Mistral, Qwen2, Qwen3, SmolLM2."""

from __future__ import annotations

from torch import Tensor

from common.model.decoder import Decoder, Step
from kernels import add_rms_norm, rms_norm


class Llama(Decoder):
    """Pre-norm: x += attention(norm(x)); x += mlp(norm(x)). Each sum is fused with the norm that follows it."""

    def layers(self, hidden: Tensor, step: Step) -> Tensor:
        eps, layers = self.config.rms_norm_eps, self.weights.layers
        following = [*(layer.input_norm for layer in layers[1:]), self.weights.norm]
        normed = rms_norm(hidden, layers[0].input_norm, eps)
        for index, (layer, next_norm) in enumerate(zip(layers, following, strict=True)):
            mixed = self.attention(index, layer, normed, step)
            hidden, normed = add_rms_norm(self.wanted(index, hidden, step), mixed, layer.mlp_norm, eps)
            hidden, normed = add_rms_norm(hidden, self.mlp(index, layer, normed, step), next_norm, eps)
        return normed
