"""Gemma 3 (text): norms before and after attention and MLP, normed q and k, most layers with a sliding window."""

from __future__ import annotations

from torch import Tensor

from diptych.common.errors import ModelError
from diptych.common.model.decoder import Decoder, Step
from diptych.common.model.weights import LayerWeights
from diptych.kernels import rms_norm


class Gemma3(Decoder):
    """Sandwich norm: x += norm(attention(norm(x))); x += norm(mlp(norm(x)))."""

    def layer(self, index: int, weights: LayerWeights, hidden: Tensor, step: Step) -> Tensor:
        eps = self.config.rms_norm_eps
        after_attention, after_mlp = weights.post_attention_norm, weights.post_mlp_norm
        if after_attention is None or after_mlp is None:
            raise ModelError(f"layer {index} lacks the norms after attention and MLP that Gemma 3 has: load it again")
        mixed = self.attention(index, weights, rms_norm(hidden, weights.input_norm, eps), step)
        hidden = self.wanted(index, hidden, step) + rms_norm(mixed, after_attention, eps)
        return hidden + rms_norm(self.mlp(weights, rms_norm(hidden, weights.mlp_norm, eps)), after_mlp, eps)
