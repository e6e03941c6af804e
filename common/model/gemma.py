"""Gemma 2, and Gemma 3 (text): norms before and after attention and MLP, many layers with a sliding window."""

from __future__ import annotations

from torch import Tensor

from common.errors import ModelError
from common.model.decoder import Decoder, Step
from kernels import add_rms_norm, rms_norm


class Gemma(Decoder):
    """Sandwich norm: x += norm(attention(norm(x))); x += norm(mlp(norm(x))). Sums are fused with the next norm."""

    def layers(self, hidden: Tensor, step: Step) -> Tensor:
        eps, layers = self.config.rms_norm_eps, self.weights.layers
        following = [*(layer.input_norm for layer in layers[1:]), self.weights.norm]
        normed = rms_norm(hidden, layers[0].input_norm, eps)
        for index, (layer, next_norm) in enumerate(zip(layers, following, strict=True)):
            if layer.post_attention_norm is None or layer.post_mlp_norm is None:
                raise ModelError(f"layer {index} lacks the norms after attention and MLP of Gemma: load it again")
            mixed = rms_norm(self.attention(index, layer, normed, step), layer.post_attention_norm, eps)
            hidden, normed = add_rms_norm(self.wanted(index, hidden, step), mixed, layer.mlp_norm, eps)
            change = rms_norm(self.mlp(index, layer, normed, step), layer.post_mlp_norm, eps)
            hidden, normed = add_rms_norm(hidden, change, next_norm, eps)
        return normed
