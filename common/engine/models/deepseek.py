"""DeepSeek V2 and V3, Mistral Small 4: multi-head latent attention. Only latents are cached.

Keys and values are linear in a token's latent c: k = W_uk c, v = W_uv c. So q.k = (W_uk^T q).c, and a weighted sum of
values is W_uv times the same sum of latents. Queries are mapped to latent space and sums of latents out of it, so that
keys and values of heads are never materialised (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).
"""

from __future__ import annotations

from torch import Tensor

from common.engine.models.decoder import Step
from common.engine.models.llama import Llama
from common.engine.models.weights import LatentWeights, LayerWeights
from common.errors import ModelError
from common.model_files.architecture import NORM_EPS
from kernels import paged_attention, rms_norm, write_latents


class DeepSeek(Llama):
    """Llama layers with latent attention. Chunks and single rows use the same operations, for bitwise equal results."""

    def attention(self, index: int, weights: LayerWeights, normed: Tensor, step: Step) -> Tensor:
        config, latent = self.config, _latent(index, weights)
        queries = self.write_kv(index, weights, normed, step)
        growth = step.growth.get(config.layer_ropes[index])  # Mistral Small 4
        queries = queries if growth is None else queries * growth
        scale = step.scales[index].key  # latents serve as keys and values
        summed = paged_attention(
            queries,
            step.kv,
            index,
            step.plan,
            scale=config.attention_scale,
            k_scale=scale,
            v_scale=scale,
            latent_dim=config.latent_dim,
            batch_invariant=weights.output.batch_invariant,
        )
        return self._summed(weights.output(latent.expand(self.wanted(index, summed.flatten(1), step))))

    def write_kv(self, index: int, weights: LayerWeights, normed: Tensor, step: Step) -> Tensor:
        latent = _latent(index, weights)
        q = normed
        if latent.query_down is not None and latent.query_norm is not None:
            q = rms_norm(latent.query_down(normed), latent.query_norm, NORM_EPS)
        q = weights.qkv(q)
        return write_latents(
            q,
            latent.absorb(q),
            latent.down(normed),
            *step.ropes[self.config.layer_ropes[index]],
            step.kv,
            index,
            step.slots,
            norm=latent.norm,
            eps=NORM_EPS,
            k_scale=step.scales[index].key,
        )


def _latent(index: int, weights: LayerWeights) -> LatentWeights:
    if weights.latent is None:
        raise ModelError(f"layer {index} has no weights for latent attention: load it again")
    return weights.latent
