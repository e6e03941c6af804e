"""Minimum memory of a worker, computed from its settings and the headers of its weight files.

It is a lower bound, so that no worker that could run is refused. Lossless packing may take fewer bits
(`kernels/cpu/packed.py`), memory-mapped tables are page cache that the kernel can drop, and vectors, padding and the
scales of some formats are omitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from common.config import WorkerConfig
from common.engine.kv import block_bytes
from common.engine.models import StoredWeights, effective_quantization, open_model, torch_device
from common.engine.models.draft_heads import MTP, Eagle3Tensors
from common.engine.run.draft_model import DraftPlan
from common.engine.run.memory_need import GIB, MemoryNeed
from common.engine.weights.formats import HEAD, TABLE, StoredForm, StoredTensor
from common.model_files import ModelConfig, ModelFiles, Quantization, weight_files
from common.model_files.architecture import Shard

DTYPE_BYTES: Final = {"float32": 4.0, "bfloat16": 2.0}
MIN_PACKED_BYTES: Final = {"float32": 2.0, "bfloat16": 1.5}
"""Minimum bytes per weight on a CPU, whose kernels widen 16 bits to float32, and 12 bits to bfloat16."""
ROUNDED: Final = {8: 1.0 + (2 + 4) / 64, 4: 0.5 + (2 + 2) / 32}
"""Bytes per weight by number of bits, including the scale and offset of its group."""
ALWAYS_FLOATS: Final = ("kv_b_proj.weight", "attn_kv_b.weight", "attn_k_b.weight", "attn_v_b.weight")
"""Name suffixes of matrices that are never quantised, because they compute keys and values from latents."""
MIN_BLOCKS: Final = 2
"""Number of KV blocks that are counted if the cache size is measured after loading."""


@dataclass(frozen=True, slots=True)
class WeightFootprint:
    """Representation of a model's matrices on a CPU or GPU: see `Quantization`.

    `tied`: the embedding table is also the output head. `with_head`: the model computes logits.
    """

    dtype: str
    quantization: Quantization
    on_cpu: bool
    tied: bool
    with_head: bool = True

    def of(self, tensors: Iterable[StoredTensor]) -> int:
        """Return the minimum bytes of the matrices among these tensors."""
        return int(sum(self._bytes_of(tensor) for tensor in tensors if tensor.is_matrix))

    def _bytes_of(self, tensor: StoredTensor) -> float:
        if tensor.name in HEAD:
            return 0.0 if self.tied or not self.with_head else self._matrix(tensor, self.quantization.head)
        if tensor.name in TABLE:
            return self._table(tensor)
        if tensor.name.endswith(ALWAYS_FLOATS):
            return self._dense(tensor)
        return self._matrix(tensor, self.quantization)

    def _table(self, tensor: StoredTensor) -> float:
        """Return the bytes of the embedding table, and of the head if they are tied."""
        is_mapped = self.on_cpu and tensor.dtype == self.dtype
        table = 0.0 if is_mapped else tensor.num_weights * DTYPE_BYTES[self.dtype]
        if not (self.tied and self.with_head):
            return table
        if self.quantization is Quantization.NONE:  # shared by both
            return self._dense(tensor)
        return table + self._matrix(tensor, self.quantization.head)

    def _matrix(self, tensor: StoredTensor, wanted: Quantization) -> float:
        if self._is_kept(tensor, wanted):
            return self._kept(tensor)
        bits = wanted.bits(tensor.form is not StoredForm.FLOATS) if self.on_cpu else 0
        return tensor.num_weights * ROUNDED[bits] if bits else self._dense(tensor)

    def _is_kept(self, tensor: StoredTensor, wanted: Quantization) -> bool:
        is_multiplied = tensor.form is StoredForm.INTEGERS or (
            tensor.form is StoredForm.SMALL_FLOATS and not self.on_cpu
        )
        return is_multiplied and wanted.keeps_held and wanted.takes(tensor.bits)

    def _kept(self, tensor: StoredTensor) -> float:
        if not self.on_cpu or not tensor.group:
            return tensor.num_bytes
        return tensor.num_weights * (tensor.bits / 8 + (6 if tensor.bits == 8 else 4) / tensor.group)

    def _dense(self, tensor: StoredTensor) -> float:
        # Products of integers and scales need all bits of float32.
        fits_fewer = self.on_cpu and (tensor.form is not StoredForm.INTEGERS or self.dtype == "bfloat16")
        return tensor.num_weights * (MIN_PACKED_BYTES if fits_fewer else DTYPE_BYTES)[self.dtype]


@dataclass(frozen=True, slots=True)
class WeightForm:
    """Options of `load_model` that determine the size of the weights."""

    dtype: str
    device: str
    quantization: str
    with_head: bool = True


def weight_bytes(files: ModelFiles, form: WeightForm, draft_head: str = "") -> int:
    """Return the minimum bytes of a model's weights, including the draft head of `--draft-head`.

    Reads only file headers. Raises the errors of `load_model`.
    """
    return _weight_bytes(*open_model(files), form, draft_head)


def _weight_bytes(config: ModelConfig, source: StoredWeights, form: WeightForm, draft_head: str) -> int:
    place = torch_device(form.device)
    wanted = effective_quantization(form.quantization, source, place)
    holding = WeightFootprint(form.dtype, wanted, place.type == "cpu", bool(config.tie_embeddings), form.with_head)
    num_layers = config.num_layers + (draft_head == MTP)
    total = holding.of(tensor for tensor in source.stored() if tensor.is_of(num_layers))
    folder = Path(draft_head).expanduser()
    if draft_head in ("", MTP) or not folder.is_dir():
        return total
    found = weight_files(folder)
    # The head's embedding table and output head may be shared with the model.
    return total + holding.of(one for one in Eagle3Tensors(found).stored() if one.name not in (*TABLE, *HEAD))


def required_memory(
    files: ModelFiles, config: WorkerConfig, form: WeightForm, kv_dtype: str, draft: DraftPlan | None = None
) -> MemoryNeed:
    """Return the need of a worker or its rank 0. Only rank 0 has a `draft` model. Raises like `weight_bytes`."""
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
    return int(config.kv_gib * GIB) or MIN_BLOCKS * per_block


def remedies(config: WorkerConfig) -> str:
    """Return settings that need less memory than these, for an error message."""
    found = []
    if config.on_gpu:
        found.append("a model with fewer bits")
    elif config.quantization != "int4":
        found.append("--quantization int4" if config.quantization == "int8" else "--quantization int8 or int4")
    if config.num_blocks:
        found.append(f"--num-blocks below {config.num_blocks}")
    elif config.kv_gib:
        found.append(f"--kv-memory-gib below {config.kv_gib:g}")
    if config.on_gpu:
        found.append(f"--tensor-parallel-size above {config.tensor_parallel_size}, on more GPUs")
    return ", or ".join(found)
