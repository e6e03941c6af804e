"""Adapter slots of a model. Steps add the contents of a slot to the rows that name it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from common.engine.adapters.peft_file import AdapterWeights, read_adapter
from common.engine.models import LayerSites
from common.model_files import ModelConfig


class AdaptedModel(Protocol):
    """A model whose layers support adapters."""

    config: ModelConfig

    def add_sites(self, max_loras: int, max_rank: int) -> tuple[LayerSites, ...]:
        """Create the LoRA sites of its layers."""


class AdapterSlots:
    """Adapter slots. One thread at a time writes to a slot, which no step may read at that time."""

    def __init__(
        self, model: AdaptedModel, *, max_loras: int, max_rank: int, config: ModelConfig | None = None
    ) -> None:
        """Adapters must fit `config`, the model's by default."""
        self.max_loras, self.max_rank = max_loras, max_rank
        self._config = config or model.config
        self._layers = model.add_sites(max_loras, max_rank)

    def read(self, path: str) -> AdapterWeights:
        """Read the adapter in a folder. Raises ModelError if it does not fit."""
        return read_adapter(Path(path), self._config, self.max_rank)

    def fill(self, place: int, adapter: AdapterWeights, path: str) -> int:
        """Write an adapter, which was read from `path`, to all sites of a slot. Returns its memory in bytes."""
        num_bytes = 0
        for index, sites in enumerate(self._layers):
            changes = adapter.layers.get(index, {})
            for name in ("qkv", "output", "gate_up", "down"):
                site = getattr(sites, name)
                if site is not None:
                    num_bytes += site.set(place, changes.get(name, ()))
        return num_bytes
