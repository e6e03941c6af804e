"""OLMo 2, OLMo 3 and EXAONE 4: norms on the outputs of attention and MLP, none on their inputs."""

from __future__ import annotations

from torch import Tensor

from common.engine.models.decoder import Decoder, Step
from kernels import add_rms_norm, rms_norm


class Olmo(Decoder):
    """Post-norm: x += norm(attention(x)); x += norm(mlp(x)). The last sum is fused with the final norm."""

    def layers(self, hidden: Tensor, step: Step) -> Tensor:
        eps, final = self.config.rms_norm_eps, self.weights.norm
        normed = hidden
        step.states.record(0, hidden)
        for index, layer in enumerate(self.weights.layers):
            mixed = rms_norm(self.attention(index, layer, hidden, step), layer.norms["after_attention"], eps)
            # Backends have no plain sum, so a norm is computed too. Only the last layer uses it.
            hidden, _ = add_rms_norm(self.wanted(index, hidden, step), mixed, final, eps)
            change = rms_norm(self.mlp(index, layer, hidden, step), layer.norms["after_mlp"], eps)
            hidden, normed = add_rms_norm(hidden, change, final, eps)
            step.states.record(index + 1, hidden)
        return normed
