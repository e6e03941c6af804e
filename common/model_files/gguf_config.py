"""Reader of a model's configuration from GGUF metadata. Does not load torch.

Sources of keys and of llama.cpp's built-in defaults: ggml's docs/gguf.md, llama.cpp's src/llama-model.cpp.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.model_files.architecture.fields import FieldReader
from common.model_files.architecture.latent import LatentConfig, latent_scale, read_gguf_latent
from common.model_files.architecture.rope import RopeConfig, RopeReader
from common.model_files.config import ModelConfig, checked
from common.model_files.families import Family, GGUFFacts, gguf_family

SCALINGS = ("none", "linear", "yarn")


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Facts that metadata omit and the file's tensors show.

    `vocab_size` is the number of rows of the token embedding. `tied`: there is no output matrix. `qkv_bias` and
    `head_norms`: the first layer has them. `factors` are LongRoPE's "short" and "long" factors, if any.
    """

    vocab_size: int
    tied: bool = True
    qkv_bias: bool = False
    head_norms: bool = False
    factors: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, names: Collection[str], vocab_size: int, factors: Mapping[str, Any]) -> TensorFacts:
        """Create from the `names` of the file's tensors."""
        return cls(
            vocab_size,
            "output.weight" not in names,
            "blk.0.attn_q.bias" in names or "blk.0.attn_qkv.bias" in names,
            "blk.0.attn_q_norm.weight" in names,
            factors,
        )


def from_gguf(metadata: Mapping[str, Any], facts: TensorFacts, path: Path) -> ModelConfig:
    """Read GGUF metadata. Raises ModelError if they are damaged, or describe an unsupported model."""
    return GGUFReader(metadata, facts, path).read()


class GGUFReader(FieldReader):
    """Reader of GGUF metadata, whose keys have the architecture's name as prefix."""

    def __init__(self, fields: Mapping[str, Any], facts: TensorFacts, path: Path) -> None:
        architecture = str(fields.get("general.architecture"))
        super().__init__(fields, path, f"{architecture}.")
        self.facts = facts
        self.family: Family = gguf_family(architecture, self)
        assert self.family.gguf is not None
        self.of_gguf: GGUFFacts = self.family.gguf

    def read(self) -> ModelConfig:
        family = self.family
        heads, hidden = (self.count(name) for name in ("attention.head_count", "embedding_length"))
        extra = self.whole("nextn_predict_layers", 0)
        layers = self.layers("block_count") - extra
        if layers < 1:
            raise self.wrong("nextn_predict_layers", extra, f"fewer than the {layers + extra} of block_count")
        latent = read_gguf_latent(self) if family.latents else None
        head_dim = self._head_dim(hidden // heads) if latent is None else latent.key_dim
        windows = self._windows(layers)
        experts = family.experts.read_gguf(self, layers)
        residual = self.positive("residual_scale", 1.0)  # see `HFReader`
        rope_dim = head_dim if latent is None else latent.rope_dim
        config = ModelConfig(
            model_type=family.model_type,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=self.count("attention.head_count_kv", heads) if latent is None else 1,
            head_dim=head_dim,
            hidden_size=hidden,
            intermediate_size=self.count("feed_forward_length", experts.intermediate_size if experts else None),
            vocab_size=self.facts.vocab_size,
            max_model_len=self.count("context_length"),
            rms_norm_eps=self.number("attention.layer_norm_rms_epsilon") / residual**2,
            layer_windows=windows,
            layer_ropes=self._ropes(windows, rope_dim),
            attention_scale=self._attention_scale(layers, hidden // heads, head_dim, latent),
            activation=family.activation,
            tie_embeddings=self.facts.tied,
            qkv_bias=self.facts.qkv_bias,
            output_bias=self.of_gguf.output_bias,
            qk_norm=self.facts.head_norms and family.qk_norm != "heads",
            wide_qk_norm=family.qk_norm == "heads",
            sinks=family.sinks,
            fused_qkv=family.fused_qkv,
            fused_gate_up=family.fused_gate_up,
            experts=experts,
            embedding_scale=self._embedding_scale(hidden, residual),
            attention_softcap=self._softcap("attn_logit_softcapping"),
            final_softcap=self._softcap("final_logit_softcapping"),
            logits_divisor=self.positive("logit_scale", 1.0),
            latent=latent,
            extra_layers=extra,
        )
        return checked(config, self.path)

    def _embedding_scale(self, hidden: int, residual: float) -> float:
        scale: float = hidden**0.5
        return scale if self.family.embeds_by_width else self.number("embedding_scale", 1.0) / residual

    def _softcap(self, name: str) -> float:
        """Return a softcap. The default is that of config.json."""
        return self.number(name, self.family.defaults.get(name) or 0.0)

    def _head_dim(self, width: int) -> int:
        head_dim = self.count("attention.key_length", width)
        if self.count("attention.value_length", head_dim) != head_dim:
            raise self.refuse("attention.value_length unlike key_length", "equal key and value sizes")
        return head_dim

    def _attention_scale(self, layers: int, width: int, head_dim: int, latent: LatentConfig | None) -> float:
        """Return the factor of attention scores. `width` is hidden_size / num_heads."""
        if latent is not None:
            return latent_scale(latent, self._rope_fields(latent.rope_dim), self.path)
        scale: float = (width if layers == self.of_gguf.width_scaled_layers else head_dim) ** -0.5
        return self.number("attention.scale", scale)

    def _windows(self, layers: int) -> tuple[int, ...]:
        if self.of_gguf.window is None:
            return (0,) * layers
        default, pattern = self.of_gguf.window
        window = int(self.number("attention.sliding_window", default))
        if not pattern:
            return (window,) * layers
        if not window:
            return (0,) * layers
        given = self.fields.get(self.prefix + "attention.sliding_window_pattern")
        if not isinstance(given, list):  # newer converters write one flag per layer
            pattern = self.count("attention.sliding_window_pattern", pattern)
            given = [(i + 1) % pattern != 0 for i in range(layers)]
        if len(given) != layers:
            raise self.refuse(f"attention.sliding_window_pattern of {len(given)} layers", f"one of {layers}")
        return tuple(window if slides else 0 for slides in given)

    def _ropes(self, windows: tuple[int, ...], rope_dim: int) -> tuple[RopeConfig, ...]:
        """Return the rotary embedding of each layer, for heads with `rope_dim` rotated elements."""
        reader = RopeReader({}, self.path, rope_dim, self.count("context_length"))
        full = reader.read(self._rope_fields(rope_dim), self.number("rope.freq_base", 10000.0))
        full = replace(full, interleaved=self.family.neighbours)
        return tuple(self._rope(layer, window, full) for layer, window in enumerate(windows))

    def _rope_fields(self, rope_dim: int) -> dict[str, Any]:
        """Return the RoPE fields under their names in config.json."""
        factors = self.facts.factors
        kind = "longrope" if factors else self.fields.get(self.prefix + "rope.scaling.type", "none")
        if not factors and kind not in SCALINGS:
            raise self.refuse(f"rope scaling {kind!r}", f"rope scaling {', '.join(SCALINGS)}")
        fields: dict[str, Any] = {"partial_rotary_factor": self.count("rope.dimension_count", rope_dim) / rope_dim}
        if kind == "none":
            return fields
        fields |= {"rope_type": kind}
        if kind in ("linear", "yarn"):
            fields |= {"factor": self.number("rope.scaling.factor")}
        if kind in ("longrope", "yarn"):
            original = self.count("rope.scaling.original_context_length")
            fields |= {"original_max_position_embeddings": original, "truncate": self.of_gguf.truncates}
        if kind == "longrope":
            fields |= {f"{length}_factor": list(each) for length, each in factors.items()}
            fields |= {"attention_factor": self.fields.get(self.prefix + "rope.scaling.attn_factor")}
        if kind == "yarn" and (log_multiplier := self.number("rope.scaling.yarn_log_multiplier", 0.0)):
            mscale = log_multiplier * self.of_gguf.mscale
            fields |= {"mscale": mscale, "mscale_all_dim": mscale}
        fields |= {"llama_4_scaling_beta": self.number("attention.temperature_scale", 0.0)}
        return fields

    def _rope(self, layer: int, window: int, full: RopeConfig) -> RopeConfig:
        """Return the rotary embedding of a layer. `full` is that of layers without a window."""
        rotates, has_windows = self.family.rotates, self.fields.get(self.prefix + "attention.sliding_window")
        if rotates == "listed" and (layer + 1) % self.family.defaults["no_rope_layer_interval"] == 0:
            return RopeConfig(full.theta, "off")
        if rotates == "window" and has_windows and not window:
            return RopeConfig(full.theta, "off")
        if window and self.of_gguf.local_rope is not None:
            return self.of_gguf.local_rope(self, full)
        return full
