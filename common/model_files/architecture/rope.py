"""Rotary embedding, read from config.json in the layouts of transformers 4 and 5. Does not load torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import shown
from common.model_files.architecture.fields import FieldReader

ROPE_SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "mrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of some layers.

    `scaling` is "none", "linear" (`factor`), "llama3" (also both frequency factors and `original_max_len`), "yarn"
    (`factor`, `original_max_len`, both betas, `truncate`), "longrope" (`factors`, each of which divides a frequency) or
    "off" (no rotation). The first `rotary_dim` elements of a head are rotated (0: all). `magnitude` multiplies cosines
    and sines. With `interleaved`, the file rotates element 2 i with element 2 i + 1. Queries at position p are
    multiplied by 1 + `query_growth` * ln(1 + p // `original_max_len`), as in Llama 4.
    """

    theta: float
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()
    magnitude: float = 1.0
    rotary_dim: int = 0
    interleaved: bool = False
    query_growth: float = 0.0


class RopeReader:
    """Reads the rotary embedding of a model. `whole` are all fields of its config.json."""

    def __init__(self, whole: Mapping[str, Any], path: Path, head_dim: int, max_len: int) -> None:
        self.whole, self.path, self.head_dim, self.max_len = FieldReader(whole, path), path, head_dim, max_len

    def read(self, fields: Mapping[str, Any], theta: float) -> RopeConfig:
        """Read one rotary embedding, from `rope_scaling` or `rope_parameters`. Raises ModelError if unsupported."""
        reader = FieldReader(fields, self.path)
        kind = fields.get("rope_type", fields.get("type", "default"))
        if kind == "su" or (kind == "yarn" and "long_factor" in fields):
            kind = "longrope"  # older names
        theta, rotary_dim = reader.positive("rope_theta", theta), self._rotary_dim(reader)
        if kind == "linear":
            return RopeConfig(theta, "linear", reader.positive("factor"), rotary_dim=rotary_dim)
        if kind == "llama3":
            return RopeConfig(
                theta,
                "llama3",
                reader.positive("factor"),
                reader.positive("low_freq_factor"),
                reader.positive("high_freq_factor"),
                reader.count("original_max_position_embeddings"),
                rotary_dim=rotary_dim,
            )
        if kind == "yarn":
            return self._yarn(reader, theta, rotary_dim)
        if kind == "longrope":
            return self._longrope(reader, theta, rotary_dim)
        if kind not in ROPE_SCALINGS:
            raise self.whole.refuse(f"rope scaling {shown(kind)}", f"rope scaling {', '.join(ROPE_SCALINGS)}")
        # Dynamic scaling applies only beyond max_position_embeddings, the longest context that is served.
        return RopeConfig(theta, rotary_dim=rotary_dim)

    def _rotary_dim(self, reader: FieldReader) -> int:
        share = reader.number("partial_rotary_factor", self.whole.number("partial_rotary_factor", 1.0))
        rotary_dim = int(self.head_dim * share)
        if not 0 < rotary_dim <= self.head_dim or rotary_dim % 2:
            raise self.whole.refuse(
                f"partial_rotary_factor {share:g} of heads of {self.head_dim}", "an even number of rotated elements"
            )
        return 0 if rotary_dim == self.head_dim else rotary_dim

    def _original_max_len(self, reader: FieldReader) -> int:
        """Return the context length before scaling. Like in transformers, a top-level field takes precedence."""
        name = "original_max_position_embeddings"
        return self.whole.count(name, reader.count(name, self.max_len))

    def _yarn(self, reader: FieldReader, theta: float, rotary_dim: int) -> RopeConfig:
        """Read YaRN (Peng et al., 2023). The magnitude, including DeepSeek's mscale, is as in transformers."""
        original = self._original_max_len(reader)
        factor = reader.positive("factor", self.max_len / original)

        def magnitude(scale: float) -> float:
            return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

        mscale, mscale_all = reader.number("mscale", 0.0), reader.number("mscale_all_dim", 0.0)
        inferred = magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)
        return RopeConfig(
            theta,
            "yarn",
            factor,
            original_max_len=original,
            beta_fast=reader.positive("beta_fast", 32.0),
            beta_slow=reader.positive("beta_slow", 1.0),
            truncate=reader.flag("truncate", True),
            magnitude=reader.number("attention_factor", inferred),
            rotary_dim=rotary_dim,
            query_growth=reader.number("llama_4_scaling_beta", 0.0),
        )

    def _longrope(self, reader: FieldReader, theta: float, rotary_dim: int) -> RopeConfig:
        """Read LongRoPE (Ding et al., 2024). One set of factors serves all lengths, because cached keys do not change.

        These are the long factors, unless the model's context is no longer than that of the short ones.
        """
        original, half = self._original_max_len(reader), (rotary_dim or self.head_dim) // 2
        factor = reader.positive("factor", self.max_len / original)
        if original < 2:
            raise self.whole.wrong("original_max_position_embeddings", original, "2 or more for longrope")
        inferred = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        short, long = reader.numbers("short_factor", half), reader.numbers("long_factor", half)
        return RopeConfig(
            theta,
            "longrope",
            original_max_len=original,
            factors=long if self.max_len > original else short,
            magnitude=reader.number("attention_factor", inferred),
            rotary_dim=rotary_dim,
        )
