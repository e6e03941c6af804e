"""Windows and rotary embedding of each layer, read from config.json. Does not load torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import shown
from common.model_files.architecture.fields import FieldReader
from common.model_files.architecture.rope import RopeConfig, RopeReader

if TYPE_CHECKING:
    from common.model_files.families.family import Family

KINDS = {"sliding_attention", "full_attention"}
LETTERS = {"L": "sliding_attention", "G": "full_attention"}
"""Letters of EXAONE's `sliding_window_pattern`: local and global attention."""


class LayerReader(FieldReader):
    """Reads the attention of each layer of a model with complete fields."""

    def __init__(
        self, fields: Mapping[str, Any], path: Path, family: Family, *, num_layers: int, rope_dim: int
    ) -> None:
        """`rope_dim` is the number of rotated elements of a head."""
        super().__init__(fields, path)
        self.num_layers, self.family = num_layers, family
        self.max_len = self.count("max_position_embeddings")
        self._rope_dim = rope_dim

    def windows(self) -> tuple[int, ...]:
        """Return the window of each layer in tokens, including the current one (0: full attention)."""
        kinds = self.fields.get("layer_types")
        if self.family.windows is None and isinstance(kinds, list) and "sliding_attention" in kinds:
            raise self.refuse(f"layer_types sliding_attention of {self.family.model_type}", "full attention")
        if not self._slides():
            return (0,) * self.num_layers
        window = self.count("sliding_window")
        return tuple(window if kind == "sliding_attention" else 0 for kind in self._kinds())

    def ropes(self) -> tuple[RopeConfig, ...]:
        """Return the rotary embedding of each layer."""
        reader = RopeReader(self.fields, self.path, self._rope_dim, self.max_len)
        theta = self.positive("rope_theta")
        if self.family.local_theta is not None:
            found = self._by_kind(reader, theta, self.family.local_theta)
        else:
            found = (reader.read(self.mapping("rope_parameters"), theta),) * self.num_layers
        found = tuple(replace(rope, interleaved=self.family.neighbours) for rope in found)
        return tuple(
            rope if rotates else RopeConfig(rope.theta, "off")
            for rope, rotates in zip(found, self._rotates(), strict=True)
        )

    def _slides(self) -> bool:
        """Whether any layer has a window."""
        windows = self.family.windows
        if windows is None or not self.fields.get("sliding_window"):
            return False
        return not windows.asked_for or self.flag("use_sliding_window")

    def _rotates(self) -> list[bool]:
        """Return whether each layer rotates queries and keys."""
        if self.family.rotates == "window":
            return [not self._slides() or kind == "sliding_attention" for kind in self._kinds()]
        if self.family.rotates == "all":
            return [True] * self.num_layers
        given = self.fields.get("no_rope_layers")  # 1: the layer rotates
        if not isinstance(given, list):
            interval = self.count("no_rope_layer_interval")
            return [(i + 1) % interval != 0 for i in range(self.num_layers)]
        if len(given) < self.num_layers:
            raise self.refuse(f"no_rope_layers of {len(given)} layers", f"one of {self.num_layers}")
        return [bool(each) for each in given[: self.num_layers]]

    def _by_kind(
        self, reader: RopeReader, theta: float, local: Callable[[FieldReader, float], float]
    ) -> tuple[RopeConfig, ...]:
        """Return the rotary embeddings of a model whose sliding layers differ from the others."""
        parameters = self.mapping("rope_parameters")
        by_kind = FieldReader(parameters, self.path, "")
        far, near = parameters, dict[str, Any]()
        if parameters.keys() & KINDS:
            far, near = by_kind.mapping("full_attention"), by_kind.mapping("sliding_attention")
        far_rope, near_rope = reader.read(far, theta), reader.read(near, local(self, theta))
        return tuple(near_rope if kind == "sliding_attention" else far_rope for kind in self._kinds())

    def _kinds(self) -> list[str]:
        """Return the attention of each layer, sliding_attention or full_attention."""
        kinds, layers = self.fields.get("layer_types"), self.num_layers
        if isinstance(kinds, list):
            if len(kinds) != layers or not all(kind in ("sliding_attention", "full_attention") for kind in kinds):
                named = shown(sorted(set(map(str, kinds))))
                raise self.refuse(f"layer_types {named} of {layers} layers", "sliding or full attention")
            return kinds
        windows = self.family.windows
        period = 0 if windows is None else windows.period
        if isinstance(period, str):
            if isinstance(pattern := self.fields.get(period), str):
                return self._by_letters(period, pattern)
            period = self.count(period)
        if period:
            return ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers)]
        if self.family.rotates == "listed":
            return ["full_attention" if rotates else "sliding_attention" for rotates in self._rotates()]
        first = self.whole("max_window_layers")
        slides = [windows is None or windows.slides(i, first) for i in range(layers)]
        return ["sliding_attention" if each else "full_attention" for each in slides]

    def _by_letters(self, name: str, pattern: str) -> list[str]:
        """Return the attention of each layer from a repeated pattern of letters, such as LLLG."""
        if not pattern or set(pattern) - LETTERS.keys():
            raise self.refuse(f"{name} {shown(pattern)}", f"a {name} of the letters L and G")
        return [LETTERS[pattern[i % len(pattern)]] for i in range(self.num_layers)]
