"""Gemma 2, Gemma 3 (text) and GLM-4: norms before and after attention and MLP."""

from __future__ import annotations

from torch import Tensor

from common.engine.models.decoder import Decoder, Step
from kernels import add_rms_norm, rms_norm


class Gemma(Decoder):
    """Sandwich norm: x += norm(attention(norm(x))); x += norm(mlp(norm(x))). Sums are fused with the next norm."""

    def layers(self, hidden: Tensor, step: Step) -> Tensor:
        eps, layers = self.config.rms_norm_eps, self.weights.layers
        following = [*(layer.norms["before_attention"] for layer in layers[1:]), self.weights.norm]
        step.states.record(0, hidden)
        normed = rms_norm(hidden, layers[0].norms["before_attention"], eps)
        for index, (layer, next_norm) in enumerate(zip(layers, following, strict=True)):
            mixed = rms_norm(self.attention(index, layer, normed, step), layer.norms["after_attention"], eps)
            hidden, normed = add_rms_norm(self.wanted(index, hidden, step), mixed, layer.norms["before_mlp"], eps)
            change = rms_norm(self.mlp(index, layer, normed, step), layer.norms["after_mlp"], eps)
            hidden, normed = add_rms_norm(hidden, change, next_norm, eps)
            step.states.record(index + 1, hidden)
        return normed
