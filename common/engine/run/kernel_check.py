"""Verifies a device's kernels at the shapes of the model before a worker is ready.

Detects drivers, compilers and devices that compute wrong results.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from functools import partial

import torch

from common.engine.kv import SMALL_DTYPES, KVCache
from common.engine.models import MLP, MixtureOfExperts, SharedExpert
from common.engine.run.runner import RunnableModel
from common.errors import ModelError
from common.model_files import ModelConfig
from kernels import AttentionRule, HeadLinear, KVScales, Linear, has_device_kernels
from kernels.agreement import (
    SEED,
    Check,
    CheckedShape,
    LayerRule,
    check_kernels,
    experts_check,
    heads_check,
    product_check,
)

log = logging.getLogger(__name__)


def check_model_kernels(model: RunnableModel, kv: KVCache, *, samples: bool = True) -> None:
    """Compare all kernels that steps over `kv` use with plain torch. `samples`: the model computes logits.

    Leaves zeros in `kv`, which must be empty. Raises ModelError with each kernel that differs, its shape, the largest
    difference and the tolerance.
    """
    began = time.perf_counter()
    shape = checked_shape(model, kv, samples=samples)
    more = (*expert_checks(model, kv.device), *product_checks(model, kv.device))
    findings = check_kernels(shape, kv.tensor, more)
    wrong = [str(one) for one in findings if one.problem]
    if wrong:
        raise ModelError(
            f"{len(wrong)} of {len(findings)} kernels on {kv.device} differ from plain torch: {'; '.join(wrong)}. "
            "Check the device, its driver and the versions of torch and Triton, or start with --no-kernel-check at "
            "your own risk"
        )
    log.info(
        "kernel check passed: %d kernels agree on %s, %.1f s", len(findings), kv.device, time.perf_counter() - began
    )


def checked_shape(model: RunnableModel, kv: KVCache, *, samples: bool) -> CheckedShape:
    """Return the shapes and options at which steps over `kv` use the kernels."""
    config, on_device = model.config, has_device_kernels(kv.device.type)
    scales = kv.scales[-1]
    return CheckedShape(
        num_heads=config.num_heads,
        rules=layer_rules(config, kv, batch_invariant=_is_batch_invariant(model)),
        dtype=model.dtype,
        hidden_size=config.hidden_size,
        widths=gated_widths(config),
        activation=config.activation,
        vocab_size=config.vocab_size if samples else 0,
        eps=config.rms_norm_eps,
        longest=config.max_model_len,
        qk_norm=config.qk_norm,
        wide_qk_norm=config.wide_qk_norm,
        device_kernels=on_device,
        quantised_wire=kv.dtype not in SMALL_DTYPES.values(),
        latent_dim=config.latent_dim,
        query_dim=0 if config.latent is None else config.latent.query_dim,
        scales=KVScales(scales.key, scales.key) if config.latent_dim else scales,
    )


def _is_batch_invariant(model: RunnableModel) -> bool:
    weights = getattr(model, "weights", None)  # test models have none
    return weights is not None and weights.layers[0].output.batch_invariant


def layer_rules(config: ModelConfig, kv: KVCache, *, batch_invariant: bool = False) -> list[LayerRule]:
    """Return the attention rule of the last layer of each window size, with its scales."""
    random = torch.Generator().manual_seed(SEED)
    sinks = torch.randn(config.num_heads, generator=random).to(kv.device) if config.sinks else None
    rule = AttentionRule(
        config.attention_scale,
        softcap=config.attention_softcap,
        sinks=sinks,
        latent_dim=config.latent_dim,
        batch_invariant=batch_invariant,
    )
    last = {window: layer for layer, window in enumerate(config.layer_windows)}
    found = []
    for window, layer in last.items():
        k_scale, v_scale = kv.scales[layer]
        v_scale = k_scale if config.latent_dim else v_scale
        found.append(LayerRule(layer, rule._replace(window=window, k_scale=k_scale, v_scale=v_scale)))
    return found


def gated_widths(config: ModelConfig) -> list[int]:
    """Return the widths of all kinds of MLPs of the model."""
    experts = config.experts
    if experts is None:
        return [config.intermediate_size]
    dense = [] if all(experts.layers) else [config.intermediate_size]
    return [*dense, experts.intermediate_size, *([experts.shared_size] if experts.shared_size else [])]


def expert_checks(model: RunnableModel, device: torch.device) -> Iterator[Check]:
    """Yield the check of the first layer with experts that device kernels multiply."""
    weights = getattr(model, "weights", None)  # test models have none
    for layer in weights.layers if weights is not None else ():
        mlp = layer.mlp
        if isinstance(mlp, MixtureOfExperts) and mlp.experts.by_device:
            random = torch.Generator().manual_seed(SEED)
            sizes = (mlp.routing.per_token, model.config.hidden_size, model.config.activation)
            yield partial(experts_check, mlp.experts, *sizes, device, random)
            return


def product_checks(model: RunnableModel, device: torch.device) -> Iterator[Check]:
    """Yield a check of one matrix of each shape and format that device kernels multiply."""
    seen: set[tuple[object, ...]] = set()
    for linear in matrices_of(model):
        form: tuple[object, ...] = (linear.out_features, linear.in_features)
        if isinstance(linear, HeadLinear):
            form += (linear.num_heads,)
        elif (held := linear.held) is not None:
            form += (held.group, held.packed, held.floats, held.offset is None)
        if not linear.by_device or form in seen:
            continue
        seen.add(form)
        random = torch.Generator().manual_seed(SEED)
        if isinstance(linear, HeadLinear):
            yield partial(heads_check, linear, device, random)
        else:
            yield partial(product_check, linear, device, random)


def matrices_of(model: RunnableModel) -> Iterator[Linear | HeadLinear]:
    """Yield the matrices of a step, except experts and a quantised head, whose floats may take gigabytes."""
    weights = getattr(model, "weights", None)
    for layer in weights.layers if weights is not None else ():
        yield from (layer.qkv, layer.output)
        if (latent := layer.latent) is not None:
            yield from filter(None, (latent.query_down, latent.down, latent.absorb, latent.expand))
        if isinstance(layer.mlp, MixtureOfExperts):
            yield layer.mlp.router
        mlp = layer.mlp.shared if isinstance(layer.mlp, MixtureOfExperts) else layer.mlp
        if isinstance(mlp, SharedExpert):
            yield from filter(None, (mlp.gate,))
            mlp = mlp.mlp
        if isinstance(mlp, MLP):
            yield from (mlp.gate_up, mlp.down)
    head = None if weights is None else weights.lm_head
    if head is not None and head.held is None:
        yield head
