"""Where a draft head is, and what makes it one for the served model. No torch.

MTP layers lie in the model's own files behind its last layer (DeepSeek-V3, arXiv 2412.19437, section 2.2). EAGLE heads
have a folder of their own: config.json, and one decoder layer behind a matrix `fc` (arXiv 2401.15077, section 4.1);
what differs in EAGLE-3 is told in `eagle3_form.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.engine.models.draft_heads.eagle3_form import Eagle3Form, is_eagle3, layer_fields, read_form
from common.errors import ConfigError
from common.model_files import HFReader, ModelConfig, ModelFiles, hash_weights, read_json, weight_files
from common.model_files.architecture import RopeConfig
from common.model_files.families import FAMILIES, NormPlace

MTP = "mtp"
MTP_TYPES = tuple(family.model_type for family in FAMILIES.values() if family.mtp == "drafts")
"""Model types whose MTP layers have the form that is known here."""
EAGLE_NORMS: Mapping[NormPlace, str] = {"before_mlp": "post_attention_layernorm"}
"""Of the layer of an EAGLE or EAGLE-3 head."""
EAGLE_TYPES = ("llama",)
"""Model types of an EAGLE head's layer."""
EAGLE3_SIZES = ("num_kv_heads", "head_dim", "vocab_size")
EAGLE_SIZES = ("hidden_size", "num_heads", *EAGLE3_SIZES)
"""What heads have in common with their model: KV and vocabulary in any case, EAGLE and EAGLE-2 all of its sizes."""


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A draft head: `layer` is the configuration of its own layer, `whole` that of the model with it as one more layer.

    `weights` are its files, none for MTP. `form`: of an EAGLE-3 head, None for others.
    """

    name: str
    weights: tuple[Path, ...]
    layer: ModelConfig
    whole: ModelConfig
    form: Eagle3Form | None = None


def find_head(name: str, served: ModelFiles, config: ModelConfig) -> HeadFiles:
    """The head that the setting names: "mtp", or a folder. ConfigError for one that does not fit the model."""
    return _mtp(served, config) if name == MTP else _eagle(name, served, config)


def _mtp(served: ModelFiles, config: ModelConfig) -> HeadFiles:
    if served.format != "hf" or config.model_type not in MTP_TYPES or not config.extra_layers:
        allowed = f"empty, or the folder of an EAGLE head: {served.model_id} has no MTP layers that can be read"
        why = f"those of safetensors checkpoints of {' and '.join(MTP_TYPES)} with num_nextn_predict_layers can"
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
        allowed = f"empty: hidden states of {served.model_id} ({config.model_type}) are read by no {kind} head"
        raise ConfigError("draft_head", name, allowed)
    own = HFReader(of_layer, folder / "config.json").read()
    _check_fits(name, own, served, config, EAGLE3_SIZES if is_third else EAGLE_SIZES)
    form = read_form(name, fields, config) if is_third else None
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
    """Whether EAGLE heads read its hidden states, which they turn into logits as the model does."""
    return config.family.decoder == "llama" and config.embedding_scale == 1.0 and has_plain_logits(config)


def is_read_by_eagle3(config: ModelConfig) -> bool:
    """Whether EAGLE-3 heads read its hidden states: they are not scaled here as Granite's are, see `HFReader`."""
    is_scaled = config.logits_divisor != 1.0 or (config.embedding_scale != 1.0 and not config.family.embeds_by_width)
    return config.latent is None and not is_scaled


def has_plain_logits(config: ModelConfig) -> bool:
    """Whether logits are what `lm_head` makes."""
    return config.logits_divisor == 1.0 and not config.final_softcap


def with_layer(config: ModelConfig, digest: str, rope: RopeConfig, *, has_experts: bool) -> ModelConfig:
    """The model with a draft head's layer behind its own. The layer looks back as far as blocks are kept."""
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
    """Its keys and values lie in the model's blocks, and it reads the model's hidden states and tokens."""
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
