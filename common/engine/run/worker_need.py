"""The least memory that a worker needs, computed from its settings and from the headers of its weight files.

It is a lower bound, because a worker that would run must not be refused: packing may lose nothing in fewer
bits (`kernels/cpu/packed.py`), tables that are used as they lie in their file are page cache, which the kernel drops,
and vectors, padding and the scales of some formats are left out.
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
LEAST_PACKED: Final = {"float32": 2.0, "bfloat16": 1.5}
"""Bytes of a weight on a CPU, whose kernels widen 16 bits to float32, and 12 bits to bfloat16."""
ROUNDED: Final = {8: 1.0 + (2 + 4) / 64, 4: 0.5 + (2 + 2) / 32}
"""Bytes of a weight by its bits, with the scale and the offset of its group."""
ALWAYS_FLOATS: Final = ("kv_b_proj.weight", "attn_kv_b.weight", "attn_k_b.weight", "attn_v_b.weight")
"""The endings of names of matrices that are never quantised, because they make keys and values of latents."""
LEAST_BLOCKS: Final = 2
"""A KV cache whose size is measured once the weights are loaded is counted with so many blocks before."""


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """How a worker holds the matrices of a model: see `Quantization`; on a CPU or on a GPU.

    `tied`: the table of embeddings is the head, too. `with_head`: the model makes logits.
    """

    dtype: str
    quantization: Quantization
    on_cpu: bool
    tied: bool
    with_head: bool = True

    def of(self, tensors: Iterable[StoredTensor]) -> int:
        """Bytes that the matrices among these take, at least."""
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
        """Bytes of the table of embeddings, and of the head where it reads the same numbers."""
        is_mapped = self.on_cpu and tensor.dtype == self.dtype
        table = 0.0 if is_mapped else tensor.num_weights * DTYPE_BYTES[self.dtype]
        if not (self.tied and self.with_head):
            return table
        if self.quantization is Quantization.NONE:  # one copy serves both
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
        # Integers times their scales fill float32.
        fits_fewer = self.on_cpu and (tensor.form is not StoredForm.INTEGERS or self.dtype == "bfloat16")
        return tensor.num_weights * (LEAST_PACKED if fits_fewer else DTYPE_BYTES)[self.dtype]


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
