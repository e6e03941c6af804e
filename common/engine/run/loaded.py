"""A loaded model: weights, KV cache, runner, and the fingerprint of their layout."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from common.blocks import Window
from common.config import USUAL_SEQS, DecodeWorkerConfig, PrefillWorkerConfig, WorkerConfig
from common.engine.adapters import AdapterBank, AdapterSlots
from common.engine.kv import SMALL_DTYPES, KVCache, block_bytes, in_words
from common.engine.models import Decoder, kv_form, load_model, load_score, open_model
from common.engine.models.draft_heads import DraftingModel, load_drafting_model
from common.engine.run.draft_model import DraftModel, DraftPlan
from common.engine.run.graph_runner import GraphRunner
from common.engine.run.kernel_check import check_model_kernels
from common.engine.run.kv_memory import CUDAMemory, blocks_left, reserve_step_copies
from common.engine.run.memory_need import GIB, LargestSteps
from common.engine.run.recorded_steps import recorder_for
from common.engine.run.runner import ModelRunner, RunnableModel
from common.engine.run.warm_up import warm_up_runner
from common.engine.run.worker_need import WeightForm, required_memory
from common.engine.weights.formats import KVCacheFormat
from common.errors import ConfigError, ModelError
from common.machine import CoreShare
from common.model_files import (
    GENERATES,
    ModelConfig,
    ModelFiles,
    ServedTask,
    layout_fingerprint,
    served_task,
    weights_fingerprint,
)
from kernels import Linear, has_device_kernels, share_cores, share_weights
from kernels.interface import UNSCALED, pinned

log = logging.getLogger(__name__)


class OtherRanks(Protocol):
    """Processes of the worker's other ranks."""

    @property
    def failure(self) -> str:
        """Reason why no further step can run, or "". Thread-safe."""

    def close(self) -> None:
        """Stop them. No step may run."""


@dataclass(frozen=True, slots=True)
class ModelFactories:
    """Factories that replace the defaults for parts of a loaded model.

    `runner` creates the runner for a cache, `cache` a cache of a number of blocks, `places` slots for a number of
    adapters up to a rank. `num_blocks` returns the number of blocks that fit.
    """

    runner: Callable[[KVCache], ModelRunner] | None = None
    cache: Callable[[int], KVCache] | None = None
    places: Callable[[int, int], AdapterSlots] | None = None
    num_blocks: Callable[[RunnableModel], int] | None = None


OWN = ModelFactories()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Model, cache and settings that an engine needs, independent of its role."""

    model_id: str
    vocab_size: int
    runner: ModelRunner
    kv: KVCache
    dtype: str
    kv_dtype: str
    quantization: str
    fingerprint: str
    weights: str
    max_model_len: int
    num_threads: int
    task: ServedTask = GENERATES
    adapters: AdapterBank | None = None
    score: Linear | None = None
    """Scoring head, float32 [labels, hidden_size]."""
    draft: DraftModel | None = None
    """Draft model of a decode worker. The fingerprint does not cover it, because its KV never leaves the worker."""
    others: OtherRanks | None = None

    @property
    def drafting(self) -> DraftingModel | None:
        """The model, if it has a draft head."""
        model = self.runner.model
        return model if isinstance(model, DraftingModel) else None

    @property
    def precision(self) -> str:
        """Description of the types of activations, weights and KV."""
        kept = {"auto": "weights quantised as in the file", "int8": "8-bit weights", "int4": "4-bit weights"}
        used = [kept[self.quantization]] if self.quantization in kept else []
        used += [f"KV in {self.kv_dtype}"] if self.kv_dtype != self.dtype else []
        return " ".join((self.dtype, "with", " and ".join(used))) if used else self.dtype

    @property
    def window(self) -> int:
        """Widest window of all layers in tokens, or 0 if some layer has full attention."""
        return self.kv.config.window

    @property
    def windows_in_words(self) -> str:
        """Description of the windows and what they save, or ""."""
        return in_words(self.kv.config.layer_windows, self.kv.block_size, self.max_model_len)

    @property
    def token_s(self) -> float:
        """Seconds per token in the last step. Right after loading: in the last warm-up step."""
        profile = self.runner.profile
        return profile.forward_s / max(1, profile.num_tokens)

    @staticmethod
    def set_num_threads(num_threads: int) -> None:
        """Set the number of threads that compute the calling thread's steps."""
        torch.set_num_threads(num_threads)

    @staticmethod
    def pinned_bytes() -> int:
        """Return the host memory that this process has pinned for copies of steps and KV."""
        return pinned().num_bytes

    @staticmethod
    def share_cores(cores: CoreShare) -> None:
        """Make long steps follow changes of `cores` while they run. Call it before the first step."""
        share_cores(cores.view, cores.num_cores)

    @classmethod
    def load(cls, files: ModelFiles, config: WorkerConfig) -> LoadedModel:
        """Load the model and allocate its cache. Raises ModelError (also if it does not fit) or ConfigError."""
        task = task_of(files, config)
        share_weights("" if config.on_gpu else config.weight_share)
        if config.kv_cache_dtype == "int8" and open_model(files)[0].latent_dim:
            raise ConfigError("kv_cache_dtype", "int8", "auto or fp8 for a model with latent attention")
        dtype = native_dtype(config.torch_device) if config.dtype == "auto" else config.dtype
        options = {"dtype": dtype, "device": config.torch_device, "quantization": config.quantization}
        form = kv_form(files, config.kv_cache_dtype, dtype)
        plan = None
        if isinstance(config, DecodeWorkerConfig) and config.draft_model:
            plan = DraftPlan.of(files, config, dtype)
        required_memory(files, config, WeightForm(**options, with_head=task.generates), form.dtype, plan).check(
            config.torch_device
        )
        if config.draft_head:
            return cls._with_draft_head(files, config, task, options, form)
        loaded = cls.of(
            lambda: load_model(files, **options, with_head=task.generates, batch_invariant=config.batch_invariant),
            files,
            config,
            task=task,
            draft=plan,
            form=form,
        )
        if plan is not None and isinstance(config, DecodeWorkerConfig):
            make = runner_of(config)
            return replace(loaded, draft=plan.load(config, loaded.kv.num_blocks, make))
        return add_score_head(loaded, files, config)

    @classmethod
    def _with_draft_head(
        cls, files: ModelFiles, config: WorkerConfig, task: ServedTask, options: Mapping[str, str], form: KVCacheFormat
    ) -> LoadedModel:
        if not task.generates:
            raise ConfigError("draft_head", config.draft_head, f"empty for a model with --task {task.name}")
        num_places = 2 * max(config.places, USUAL_SEQS)  # for either role, and for drafts
        return cls.of(
            lambda: load_drafting_model(files, config.draft_head, num_places=num_places, **options),
            files,
            config,
            form=form,
        )

    @classmethod
    def of(
        cls,
        load: Callable[[], RunnableModel],
        files: ModelFiles,
        config: WorkerConfig,
        factories: ModelFactories = OWN,
        task: ServedTask = GENERATES,
        draft: DraftPlan | None = None,
        form: KVCacheFormat | None = None,
    ) -> LoadedModel:
        """Load with `load`, which creates a model for the tokenizer and name of `files`. Raises the errors of `load`.

        A `draft` model has the same number of KV blocks, in the same memory. `form` overrides the settings of the
        cache.
        """
        num_threads = config.threads or len(os.sched_getaffinity(0))
        torch.set_num_threads(num_threads)
        use_exact_sums()
        model = load()
        adapters = bank_of(model, config, factories.places)
        shape, dtype = model.config, str(model.dtype).removeprefix("torch.")
        reserve_step_copies(LargestSteps.of(config, samples=task.generates), shape, torch.device(config.torch_device))
        form = form or KVCacheFormat(config.kv_cache_dtype if config.kv_cache_dtype in SMALL_DTYPES else dtype)
        kv_dtype, scales = form.dtype, form.cut(shape.num_layers).scales
        check_wire(config, kv_dtype)
        if kv_dtype == "fp8":
            log.info("KV cache is in %s", form.in_words)
        block_size, share, export = config.block_tokens, config.shares_kv, config.exports_kv
        if factories.num_blocks is None:
            num_blocks = num_kv_blocks(model, config, kv_dtype, draft, samples=task.generates)
        else:
            num_blocks = factories.num_blocks(model)
        longest = Window(shape.window, block_size).longest(num_blocks, shape.max_model_len)
        if config.max_model_len > longest:
            raise ConfigError("max_model_len", config.max_model_len, f"at most {longest} for this model and KV cache")
        make_cache = factories.cache or (
            lambda count: KVCache(
                shape, count, block_size, kv_dtype, config.torch_device, share=share, export=export, scales=scales
            )
        )
        kv = make_cache(num_blocks)
        if config.kernel_check and factories.runner is None:
            check_model_kernels(model, kv, samples=task.generates)
        make = factories.runner or (lambda kv: runner_of(config)(model, kv))
        runner = warm_up_runner(lambda: make(kv), config, samples=task.generates)
        return cls(
            files.model_id,
            shape.vocab_size,
            runner,
            kv,
            dtype,
            kv_dtype,
            model.quantization,
            fingerprint_of(files, model, kv, dtype, kv_dtype, batch_invariant=config.batch_invariant),
            weights_fingerprint(files.model_id, files.weights_hash, model.quantization),
            config.max_model_len or longest,
            num_threads,
            task,
            adapters,
        )

    def stage(self, files: ModelFiles, config: WorkerConfig) -> Callable[[], LoadedModel]:
        """Load the weights of `files` next to the current ones, and return a function that exchanges them.

        The function returns this model with the other weights and the same KV cache, which no step may use then.

        Raises ModelError if the model of `files` differs in more than its weights or does not fit, or if a setting
        rules an exchange out.
        """
        before, folder = self.runner.model, files.weights[0].parent
        for name, forbids in (
            ("--tensor-parallel-size above 1", self.others is not None),
            ("--max-loras", self.adapters is not None),
            ("--draft-head", bool(config.draft_head)),
        ):
            if forbids:
                raise ModelError(f"a worker with {name} cannot change its weights: restart it with another --model")
        form = kv_form(files, config.kv_cache_dtype, self.dtype)
        shape, scales = open_model(files)[0], form.cut(before.config.num_layers).scales
        if replace(shape, tie_embeddings=before.config.tie_embeddings) != before.config:
            raise ModelError(f"{folder}: its config.json differs from that of {self.model_id}")
        if form.dtype != self.kv_dtype or (tuple(scales) or (UNSCALED,) * shape.num_layers) != tuple(self.kv.scales):
            raise ModelError(f"{folder}: the type or scales of its KV cache differ: restart the worker")
        options = {"dtype": self.dtype, "device": config.torch_device, "quantization": config.quantization}
        generates, invariant = self.task.generates, config.batch_invariant
        share_weights("" if config.on_gpu else config.weight_share)
        model = load_model(files, **options, with_head=generates, batch_invariant=invariant)

        def exchange() -> LoadedModel:
            runner = warm_up_runner(lambda: runner_of(config)(model, self.kv), config, samples=generates)
            fingerprint = fingerprint_of(
                files, model, self.kv, self.dtype, self.kv_dtype, batch_invariant=config.batch_invariant
            )
            weights = weights_fingerprint(files.model_id, files.weights_hash, model.quantization)
            return add_score_head(replace(self, runner=runner, fingerprint=fingerprint, weights=weights), files, config)

        return exchange


def task_of(files: ModelFiles, config: WorkerConfig) -> ServedTask:
    """Return the task of the model. Raises ModelError for a task that the worker's role does not support."""
    task = served_task(files, config.task)
    if not task.generates and isinstance(config, DecodeWorkerConfig):
        raise ModelError(
            f"{files.model_id} is served to {task.name}, which only prefill workers do: start no decode workers, or "
            "use --task generate for all processes"
        )
    return task


def check_wire(config: WorkerConfig, kv_dtype: str) -> None:
    """Raise ConfigError if an 8-bit wire format is set although the cache has 8 bits already."""
    if isinstance(config, PrefillWorkerConfig) and config.kv_wire_dtype != "native" and kv_dtype in SMALL_DTYPES:
        allowed = (
            "native, because the checkpoint's kv_cache_scheme already stores KV in fp8; or use --kv-cache-dtype native"
        )
        raise ConfigError("kv_wire_dtype", config.kv_wire_dtype, allowed)


def add_score_head(loaded: LoadedModel, files: ModelFiles, config: WorkerConfig) -> LoadedModel:
    """Add the head of a scoring model. Raises ModelError like `load_score`."""
    if loaded.task.name != "score":
        return loaded
    weight = load_score(files, loaded.task.answers, config.torch_device)
    return replace(loaded, score=Linear(weight, batch_invariant=config.batch_invariant))


def fingerprint_of(
    files: ModelFiles, model: RunnableModel, kv: KVCache, dtype: str, kv_dtype: str, *, batch_invariant: bool
) -> str:
    """Return the fingerprint of the blocks that `kv` sends and receives. It does not cover the number of ranks."""
    shape = model.config
    return layout_fingerprint(
        files.model_id,
        files.weights_hash,
        num_layers=shape.num_layers,
        num_kv_heads=kv.wire_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantization=model.quantization,
        block_size=kv.block_size,
        latent_dim=shape.latent_dim,
        batch_invariant=batch_invariant,
        draft_head=shape.draft_head,
        kv_scales=kv.scales if kv.is_scaled else (),
    )


def num_kv_blocks(
    model: RunnableModel, config: WorkerConfig, kv_dtype: str, draft: DraftPlan | None = None, *, samples: bool
) -> int:
    """Return the number of blocks from the settings or the GPU's free memory. Raises ConfigError if below two."""
    if config.num_blocks:
        return config.num_blocks
    if not config.kv_gib:
        memory = CUDAMemory(torch.device(config.torch_device))
        return blocks_left(model, config, kv_dtype, memory, draft, samples=samples)
    return blocks_within(model.config, config, kv_dtype, draft.block_bytes if draft is not None else 0)


def blocks_within(shape: ModelConfig, config: WorkerConfig, kv_dtype: str, draft_bytes: int = 0) -> int:
    """Return the number of blocks that fit in the configured memory, with `draft_bytes` of draft KV per block."""
    per_block = block_bytes(shape, config.block_tokens, kv_dtype) + draft_bytes
    num_blocks = int(config.kv_gib * GIB / per_block)
    if num_blocks < 2:
        raise ConfigError("kv_memory_gib", config.kv_memory_gib, f"at least {2 * per_block / GIB:.4f} GiB")
    return num_blocks


def use_exact_sums() -> None:
    """Compute float32 products in float32, and accumulate bfloat16 products in float32, on every device.

    Some images enable TF32 in their environment. By default torch lets cuBLAS add the parts of a split bfloat16 product
    in bfloat16.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def bank_of(
    model: RunnableModel, config: WorkerConfig, make_places: Callable[[int, int], AdapterSlots] | None
) -> AdapterBank | None:
    """Create slots for the configured adapters. Raises ConfigError if the model does not support adapters."""
    if not config.lora_places:
        return None
    if not isinstance(model, Decoder) or model.config.latent is not None:
        raise ConfigError("max_loras", config.lora_places, "0: this model does not support adapters")
    if make_places is not None:
        return AdapterBank(make_places(config.lora_places, config.max_lora_rank))
    return AdapterBank(AdapterSlots(model, max_loras=config.lora_places, max_rank=config.max_lora_rank))


def runner_of(config: WorkerConfig) -> Callable[[RunnableModel, KVCache], ModelRunner]:
    """Return the factory of runners for a worker with these settings."""
    return lambda model, kv: decode_graphs(model, kv, config) or ModelRunner(model, kv)


def records_steps(config: WorkerConfig, device: torch.device) -> bool:
    """Whether decode steps are recorded: on decode workers with a CUDA device and Triton."""
    if not isinstance(config, DecodeWorkerConfig) or not config.cuda_graphs or device.type != "cuda":
        return False
    return has_device_kernels(device.type)


def decode_graphs(model: RunnableModel, kv: KVCache, config: WorkerConfig) -> ModelRunner | None:
    """Return a runner of recorded decode steps, or None if they are not recorded."""
    if not records_steps(config, kv.device):
        return None
    return GraphRunner(
        model,
        kv,
        recorder_for(kv.device),
        max_num_seqs=config.places_within(kv.num_blocks * kv.block_size),
        max_model_len=config.max_model_len or model.config.max_model_len,
        adapts=config.lora_places > 0,
    )


def native_dtype(device: str) -> str:
    """Return bfloat16 if the hardware multiplies it natively, else float32."""
    if device.startswith("cuda"):
        return "bfloat16"
    flags = Path("/proc/cpuinfo")
    text = flags.read_text(errors="replace") if flags.exists() else ""
    return "bfloat16" if "avx512_bf16" in text or "amx_bf16" in text else "float32"
