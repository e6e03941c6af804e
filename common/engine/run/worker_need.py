"""The least memory that a worker needs, computed from its settings and from the headers of its weight files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from common.config import WorkerConfig
from common.engine.kv import block_bytes
from common.engine.models import StoredWeights, effective_quantization, open_model, torch_device
from common.engine.models.draft_heads import MTP, Eagle3Tensors
from common.engine.run.draft_model import DraftPlan
from common.engine.run.held_bytes import HeldWeights
from common.engine.run.memory_need import GIB, MemoryNeed
from common.engine.weights.formats import HEAD, TABLE
from common.model_files import ModelConfig, ModelFiles, weight_files
from common.model_files.architecture import Shard

LEAST_BLOCKS: Final = 2
"""A KV cache whose size is measured once the weights are loaded is counted with so many blocks before."""


@dataclass(frozen=True, slots=True)
class WeightForm:
    """The options of `load_model` that decide how many bytes weights take."""

    dtype: str
    device: str
    quantization: str
    with_head: bool = True


def weight_bytes(files: ModelFiles, form: WeightForm, draft_head: str = "") -> int:
    """The fewest bytes that a model's weights can take, those of a draft head included, as `--draft-head` names it.

    Reads heads of files alone. ModelError as `load_model`.
    """
    return _weight_bytes(*open_model(files), form, draft_head)


def _weight_bytes(config: ModelConfig, source: StoredWeights, form: WeightForm, draft_head: str) -> int:
    place = torch_device(form.device)
    wanted = effective_quantization(form.quantization, source, place)
    holding = HeldWeights(form.dtype, wanted, place.type == "cpu", bool(config.tie_embeddings), form.with_head)
    num_layers = config.num_layers + (draft_head == MTP)
    total = holding.of(tensor for tensor in source.stored() if tensor.is_of(num_layers))
    folder = Path(draft_head).expanduser()
    if draft_head in ("", MTP) or not folder.is_dir():
        return total
    found = weight_files(folder)
    # A table and a head of its own may be the model's.
    return total + holding.of(one for one in Eagle3Tensors(found).stored() if one.name not in (*TABLE, *HEAD))


def need_of(
    files: ModelFiles, config: WorkerConfig, form: WeightForm, kv_dtype: str, draft: DraftPlan | None = None
) -> MemoryNeed:
    """What a worker needs, or its rank 0, which alone has a `draft` model. Raises as `weight_bytes` does."""
    ranks = config.tensor_parallel_size
    whole, source = open_model(files)
    shape = Shard(0, ranks).of(whole)
    if config.draft_head:
        shape = replace(shape, num_layers=shape.num_layers + 1)
    per_block = block_bytes(shape, config.block_tokens, kv_dtype)
    weights = _weight_bytes(whole, source, form, config.draft_head) // ranks
    if draft is not None:
        per_block += draft.block_bytes
        weights += weight_bytes(draft.files, WeightForm(draft.dtype, form.device, draft.quantization))
    is_measured = not config.num_blocks and not config.kv_gib
    share = config.gpu_memory_utilization if is_measured else 1.0
    return MemoryNeed(files.model_id, weights, _kv_bytes(config, per_block), remedies(config), share)


def _kv_bytes(config: WorkerConfig, per_block: int) -> int:
    if config.num_blocks:
        return config.num_blocks * per_block
    return int(config.kv_gib * GIB) or LEAST_BLOCKS * per_block


def remedies(config: WorkerConfig) -> str:
    """What would take less than these settings, as an operator would write it."""
    found = []
    if config.on_gpu:
        found.append("a model of fewer bits")
    elif config.quantization != "int4":
        found.append("--quantization int4" if config.quantization == "int8" else "--quantization int8 or int4")
    if config.num_blocks:
        found.append(f"fewer --num-blocks than {config.num_blocks}")
    elif config.kv_gib:
        found.append(f"less --kv-memory-gib than {config.kv_gib:g}")
    ranks = f"--tensor-parallel-size above {config.tensor_parallel_size}"
    found.append(f"{ranks}, on more GPUs" if config.on_gpu else f"{ranks}, on several hosts (--rank-hosts)")
    return ", or ".join(found)
