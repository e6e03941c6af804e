"""A rank's part of an adapter. Pure.

q, k, v, gate, up    rows of B for the rank's outputs      the change of the rank's outputs
o and down           columns of A for the rank's inputs    summed over ranks with their products
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from common.engine.adapters.peft_file import AdapterWeights, Site
from common.model_files import ModelConfig
from common.model_files.architecture import Shard
from kernels import LoraPart


def shard_of(adapter: AdapterWeights, config: ModelConfig, shard: Shard) -> AdapterWeights:
    """Return the rank's part of an adapter of a model with the whole `config`. Keeps digest and rank."""
    layers = {
        index: {site: tuple(_parts(site, parts, config, shard)) for site, parts in sites.items()}
        for index, sites in adapter.layers.items()
    }
    return replace(adapter, layers=layers)


def _parts(site: Site, parts: Sequence[LoraPart], config: ModelConfig, shard: Shard) -> Iterator[LoraPart]:
    dim, inner = config.head_dim, config.intermediate_size
    heads, kv_heads = shard.part(config.num_heads), shard.kv_heads(config.num_kv_heads)
    if site in ("output", "down"):
        inputs = _scaled(heads, dim) if site == "output" else shard.part(inner)
        for part in parts:
            yield part._replace(a=part.a[:, inputs.start : inputs.stop])
        return
    counts: tuple[int, ...]
    kept: tuple[range, ...]
    if site == "qkv":
        counts = (config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim)
        kept = (_scaled(heads, dim), _scaled(kv_heads, dim), _scaled(kv_heads, dim))
    else:
        counts, kept = (inner, inner), (shard.part(inner), shard.part(inner))
    for part in parts:
        place = [sum(counts[:i]) for i in range(len(counts))].index(part.first)
        rows = kept[place]
        yield LoraPart(sum(map(len, kept[:place])), part.a, part.b[rows.start : rows.stop])


def _scaled(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)
