"""Llama, and the families that differ from it only by biases, q/k norms or windows: Mistral, Qwen2, Qwen3, SmolLM2."""

from __future__ import annotations

from torch import Tensor

from diptych.common.model.decoder import Decoder, Step
from diptych.common.model.weights import LayerWeights
from diptych.kernels import rms_norm


class Llama(Decoder):
    """Pre-norm: x += attention(norm(x)); x += mlp(norm(x))."""

    def layer(self, index: int, weights: LayerWeights, hidden: Tensor, step: Step) -> Tensor:
        eps = self.config.rms_norm_eps
        mixed = self.attention(index, weights, rms_norm(hidden, weights.input_norm, eps), step)
        hidden = self.wanted(index, hidden, step) + mixed
        return hidden + self.mlp(weights, rms_norm(hidden, weights.mlp_norm, eps))
