"""Locates a draft head and checks that it fits the served model. Does not import torch.

MTP layers are in the model's own files, after its last layer (DeepSeek-V3, arXiv 2412.19437, section 2.2). EAGLE heads
have their own folder with a config.json and one decoder layer preceded by a matrix `fc` (arXiv 2401.15077, section
4.1). For EAGLE-3, see `eagle3_config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.engine.models.draft_heads.eagle3_config import Eagle3Config, is_eagle3, layer_fields, read_eagle3_config
from common.errors import ConfigError
from common.model_files import HFReader, ModelConfig, ModelFiles, hash_weights, read_json, weight_files
from common.model_files.architecture import RopeConfig
from common.model_files.families import FAMILIES, NormPlace

MTP = "mtp"
MTP_TYPES = tuple(family.model_type for family in FAMILIES.values() if family.mtp == "drafts")
"""Model types whose MTP layers are supported."""
EAGLE_NORMS: Mapping[NormPlace, str] = {"before_mlp": "post_attention_layernorm"}
"""Norms of the layer of an EAGLE or EAGLE-3 head."""
EAGLE_TYPES = ("llama",)
"""Supported model types of an EAGLE head's layer."""
EAGLE3_SIZES = ("num_kv_heads", "head_dim", "vocab_size")
EAGLE_SIZES = ("hidden_size", "num_heads", *EAGLE3_SIZES)
"""Sizes that must equal the model's: KV and vocabulary for EAGLE-3, all sizes for EAGLE and EAGLE-2."""


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A draft head. `layer`: configuration of its layer. `whole`: configuration of the model plus that layer.

    `weights` are its files, empty for MTP. `form`: format of an EAGLE-3 head, None for others.
    """

    name: str
    weights: tuple[Path, ...]
    layer: ModelConfig
    whole: ModelConfig
    form: Eagle3Config | None = None


def find_head(name: str, served: ModelFiles, config: ModelConfig) -> HeadFiles:
    """Find the head named by the setting: "mtp" or a folder. Raises ConfigError if it does not fit the model."""
    return _mtp(served, config) if name == MTP else _eagle(name, served, config)


def _mtp(served: ModelFiles, config: ModelConfig) -> HeadFiles:
    if served.format != "hf" or config.model_type not in MTP_TYPES or not config.extra_layers:
        allowed = f"empty, or the folder of an EAGLE head: {served.model_id} has no supported MTP layers"
        why = f"supported: safetensors checkpoints of {' and '.join(MTP_TYPES)} with num_nextn_predict_layers"
        raise ConfigError("draft_head", MTP, f"{allowed} ({why})")
    whole = with_layer(config, MTP, config.layer_ropes[-1], has_experts=True)
    return HeadFiles(MTP, (), whole, whole)


def _eagle(name: str, served: ModelFiles, config: ModelConfig) -> HeadFiles:
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError("draft_head", name, "mtp, or a folder with the config.json of an EAGLE head")
    weights = weight_files(folder)
    fields = read_json(folder / "config.json", required=True)
    is_third = is_eagle3(fields)
    of_layer = layer_fields(fields) if is_third else fields
    if of_layer.get("model_type") not in EAGLE_TYPES:
        allowed = f"a head of model_type {', '.join(EAGLE_TYPES)}, not {of_layer.get('model_type')!r}"
        raise ConfigError("draft_head", name, allowed)
    if not (is_read_by_eagle3(config) if is_third else is_read_by_eagle(config)):
        kind = "EAGLE-3" if is_third else "EAGLE"
        allowed = f"empty: {kind} heads are not supported for {served.model_id} ({config.model_type})"
        raise ConfigError("draft_head", name, allowed)
    own = HFReader(of_layer, folder / "config.json").read()
    _check_fits(name, own, served, config, EAGLE3_SIZES if is_third else EAGLE_SIZES)
    form = read_eagle3_config(name, fields, config) if is_third else None
    digest = hash_weights(weights, progress=False, also=_computation(fields))
    whole = with_layer(config, digest, own.layer_ropes[0], has_experts=False)
    index, window = config.num_layers, whole.layer_windows[-1]
    layer = replace(
        own,
        num_layers=index + 1,
        layer_ropes=(own.layer_ropes[0],) * (index + 1),
        layer_windows=(window,) * (index + 1),
        max_model_len=config.max_model_len,
        draft_head=digest,
    )
    return HeadFiles(name, weights, layer, whole, form)


def is_read_by_eagle(config: ModelConfig) -> bool:
    """Return whether EAGLE heads support this model: they compute logits from hidden states like the model."""
    return config.family.decoder == "llama" and config.embedding_scale == 1.0 and has_plain_logits(config)


def is_read_by_eagle3(config: ModelConfig) -> bool:
    """Return whether EAGLE-3 heads support this model. Hidden states must not be scaled like Granite's (`HFReader`)."""
    is_scaled = config.logits_divisor != 1.0 or (config.embedding_scale != 1.0 and not config.family.embeds_by_width)
    return config.latent is None and not is_scaled


def has_plain_logits(config: ModelConfig) -> bool:
    """Return whether logits are exactly the output of `lm_head`."""
    return config.logits_divisor == 1.0 and not config.final_softcap


def with_layer(config: ModelConfig, digest: str, rope: RopeConfig, *, has_experts: bool) -> ModelConfig:
    """Return the model's configuration plus a draft head's layer, with the window for which blocks are kept."""
    experts = config.experts
    if experts is not None:
        experts = replace(experts, layers=(*experts.layers, has_experts))
    return replace(
        config,
        num_layers=config.num_layers + 1,
        layer_windows=(*config.layer_windows, config.window),
        layer_ropes=(*config.layer_ropes, rope),
        experts=experts,
        draft_head=digest,
    )


def _check_fits(name: str, own: ModelConfig, served: ModelFiles, config: ModelConfig, sizes: Sequence[str]) -> None:
    """Check the head's sizes: it uses the model's KV blocks, hidden states and tokens."""
    wrong = [
        f"{size} {getattr(own, size)} instead of {getattr(config, size)}"
        for size in sizes
        if getattr(own, size) != getattr(config, size)
    ]
    if own.num_layers != 1:
        wrong.append(f"{own.num_layers} layers instead of 1")
    if wrong:
        raise ConfigError("draft_head", name, f"a head of {served.model_id}: it has {', '.join(wrong)}")


def _computation(fields: dict[str, Any]) -> bytes:
    return repr(sorted((name, repr(value)) for name, value in fields.items())).encode()
