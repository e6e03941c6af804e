"""What differs from layer to layer, as config.json describes it: windows and rotary embeddings. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.errors import shown
from common.model_files.architecture.families import ASKED_FOR_WINDOWS, WINDOWED
from common.model_files.architecture.fields import FieldReader
from common.model_files.architecture.rope import RopeConfig, RopeReader

KINDS = {"sliding_attention", "full_attention"}
PATTERNS = {"gemma2": 2, "gpt_oss": 2, "olmo3": 4}
"""Period of the layers by model type: the last layer of each period has full attention, the others a window."""


class LayerReader(FieldReader):
    """Reads the attention of each layer of a model whose fields are complete."""

    def __init__(
        self, fields: Mapping[str, Any], path: Path, *, num_layers: int, rope_dim: int, interleaved: bool
    ) -> None:
        """`rope_dim`: numbers of a head that rotary embedding sees, as neighbours if `interleaved`."""
        super().__init__(fields, path)
        self.num_layers, self.model_type = num_layers, str(fields["model_type"])
        self.max_len = self.count("max_position_embeddings")
        self._rope_dim, self._interleaved = rope_dim, interleaved

    def windows(self) -> tuple[int, ...]:
        """Tokens that each layer looks back to, itself included; 0: all."""
        if not self._slides():
            return (0,) * self.num_layers
        window = self.count("sliding_window")
        return tuple(window if kind == "sliding_attention" else 0 for kind in self._kinds())

    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embedding of each layer."""
        reader = RopeReader(self.fields, self.path, self._rope_dim, self.max_len)
        theta = self.positive("rope_theta")
        if self.model_type in ("gemma3_text", "olmo3"):
            found = self._by_kind(reader, theta)
        else:
            found = (reader.read(self.mapping("rope_parameters"), theta),) * self.num_layers
        found = tuple(replace(rope, interleaved=self._interleaved) for rope in found)
        return tuple(
            rope if rotates else RopeConfig(rope.theta, "off")
            for rope, rotates in zip(found, self._rotates(), strict=True)
        )

    def _slides(self) -> bool:
        """Whether some layer has a window."""
        if self.model_type not in WINDOWED or not self.fields.get("sliding_window"):
            return False
        return not self.model_type.startswith(ASKED_FOR_WINDOWS) or self.flag("use_sliding_window")

    def _rotates(self) -> list[bool]:
        """Whether each layer rotates queries and keys."""
        if self.model_type.startswith("exaone"):
            return [not self._slides() or kind == "sliding_attention" for kind in self._kinds()]
        if self.model_type != "smollm3":
            return [True] * self.num_layers
        given = self.fields.get("no_rope_layers")  # 1: the layer rotates
        if not isinstance(given, list):
            interval = self.count("no_rope_layer_interval")
            return [(i + 1) % interval != 0 for i in range(self.num_layers)]
        if len(given) < self.num_layers:
            raise self.refuse(f"no_rope_layers of {len(given)} layers", f"one of {self.num_layers}")
        return [bool(each) for each in given[: self.num_layers]]

    def _by_kind(self, reader: RopeReader, theta: float) -> tuple[RopeConfig, ...]:
        """Those of a model whose layers with a window have another one than the others."""
        parameters = self.mapping("rope_parameters")
        by_kind = FieldReader(parameters, self.path, "")
        far, near = parameters, dict[str, Any]()
        if parameters.keys() & KINDS:
            far, near = by_kind.mapping("full_attention"), by_kind.mapping("sliding_attention")
        local_theta = theta if self.model_type == "olmo3" else self.positive("rope_local_base_freq")
        full, local = reader.read(far, theta), reader.read(near, local_theta)
        return tuple(local if kind == "sliding_attention" else full for kind in self._kinds())

    def _kinds(self) -> list[str]:
        """The attention of each layer, sliding_attention or full_attention."""
        kinds, layers = self.fields.get("layer_types"), self.num_layers
        if isinstance(kinds, list):
            if len(kinds) != layers or not all(kind in ("sliding_attention", "full_attention") for kind in kinds):
                named = shown(sorted(set(map(str, kinds))))
                raise self.refuse(f"layer_types {named} of {layers} layers", "sliding or full attention")
            return kinds
        model_type, pattern = self.model_type, PATTERNS.get(self.model_type, 0)
        if model_type in ("gemma3_text", "exaone4", "exaone_moe"):
            pattern = self.count("sliding_window_pattern")
        if pattern:
            return ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
        if model_type == "smollm3":
            return ["full_attention" if rotates else "sliding_attention" for rotates in self._rotates()]
        first = self.whole("max_window_layers")
        if model_type in ("qwen2", "qwen3", "dots1"):
            return ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
        if model_type == "qwen2_moe":
            return ["full_attention" if i % 2 or i >= first else "sliding_attention" for i in range(layers)]
        return ["sliding_attention"] * layers
