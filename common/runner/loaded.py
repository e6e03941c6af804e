"""A model ready to run on this worker: weights, KV cache, runner, and the fingerprint of their layout."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from common.config import DecodeWorkerConfig, WorkerConfig
from common.errors import ConfigError, ModelError
from common.kv.cache import KVCache, block_bytes
from common.machine.core_share import CoreShare
from common.model.load import load_model, load_score
from common.model_files.files import ModelFiles
from common.model_files.fingerprint import layout_fingerprint, weights_fingerprint
from common.model_files.task import GENERATES, ServedTask, served_task
from common.runner.draft_model import DraftModel, DraftPlan
from common.runner.runner import ModelRunner, RunnableModel
from common.runner.warm_up import warmed_up
from common.wire.messages import PROTOCOL_VERSION
from kernels import share_cores
from kernels.device import triton_backend

GIB = 2**30


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything an engine needs that does not depend on its role."""

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
    score: torch.Tensor | None = None
    """The head of a model that scores, float32 [labels, hidden_size]."""
    draft: DraftModel | None = None
    """What a decode worker drafts with. Nothing of it leaves the worker, so the fingerprint does not cover it."""

    @property
    def precision(self) -> str:
        """Types of activations, weights and KV, in words."""
        kept = {"auto": "the file's own quantised weights", "int8": "weights of 8 bits", "int4": "weights of 4 bits"}
        used = [kept[self.quantization]] if self.quantization in kept else []
        used += [f"KV in {self.kv_dtype}"] if self.kv_dtype != self.dtype else []
        return " ".join((self.dtype, "with", " and ".join(used))) if used else self.dtype

    @property
    def token_s(self) -> float:
        """Seconds a token took in the last step; right after loading, in the last one of the warm-up."""
        profile = self.runner.profile
        return profile.forward_s / max(1, profile.num_tokens)

    @staticmethod
    def set_num_threads(num_threads: int) -> None:
        """Sets how many threads compute the calling thread's steps."""
        torch.set_num_threads(num_threads)

    @staticmethod
    def share_cores(cores: CoreShare) -> None:
        """Makes long steps read `cores` while they run. Call it before the first step."""
        share_cores(cores.address, cores.num_cores)

    @classmethod
    def load(cls, files: ModelFiles, config: WorkerConfig) -> LoadedModel:
        """Loads weights and allocates the cache. Raises ModelError or ConfigError."""
        task = served_task(files, config.task)
        if not task.generates and isinstance(config, DecodeWorkerConfig):
            raise ModelError(
                f"{files.model_id} is served to {task.name}, which prefill workers do alone: start no decode worker, "
                "or give --task generate to all processes"
            )
        dtype = native_dtype(config.device) if config.dtype == "auto" else config.dtype
        options = {"dtype": dtype, "device": config.device, "quantization": config.quantization}
        plan = None
        if isinstance(config, DecodeWorkerConfig) and config.draft_model:
            plan = DraftPlan.of(files, config, dtype)
        loaded = cls.of(
            lambda: load_model(files, **options, with_head=task.generates),
            files,
            config,
            task=task,
            draft_block_bytes=plan.block_bytes if plan is not None else 0,
        )
        if plan is not None and isinstance(config, DecodeWorkerConfig):
            make = runner_of(config)
            return replace(loaded, draft=plan.load(config, loaded.kv.num_blocks, make))
        return replace(loaded, score=load_score(files, task.answers, config.device)) if task.name == "score" else loaded

    @classmethod
    def of(
        cls,
        load: Callable[[], RunnableModel],
        files: ModelFiles,
        config: WorkerConfig,
        make_runner: Callable[[KVCache], ModelRunner] | None = None,
        task: ServedTask = GENERATES,
        draft_block_bytes: int = 0,
    ) -> LoadedModel:
        """Loads with `load`, which makes a model for the tokenizer and the name of `files`. Raises as `load`.

        A `make_runner` makes what runs it, in place of the runner of this device. Beside each KV block a draft model
        takes `draft_block_bytes` of the same memory.
        """
        num_threads = config.threads or len(os.sched_getaffinity(0))
        torch.set_num_threads(num_threads)
        torch.set_float32_matmul_precision("highest")  # some images ask for TF32 by their environment
        model = load()
        shape, dtype = model.config, str(model.dtype).removeprefix("torch.")
        kv_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        per_block = block_bytes(shape, config.block_size, kv_dtype) + draft_block_bytes
        num_blocks = config.num_blocks or int(config.kv_memory_gib * GIB / per_block)
        if num_blocks < 2:
            raise ConfigError("kv_memory_gib", config.kv_memory_gib, f"at least {2 * per_block / GIB:.4f} GiB")
        longest = min(shape.max_model_len, num_blocks * config.block_size)
        if config.max_model_len > longest:
            raise ConfigError("max_model_len", config.max_model_len, f"at most {longest} for this model and KV cache")
        kv = KVCache(shape, num_blocks, config.block_size, kv_dtype, config.device, share=config.shares_kv)
        fingerprint = layout_fingerprint(
            files.model_id,
            files.weights_hash,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype,
            kv_dtype=kv_dtype,
            quantization=model.quantization,
            block_size=config.block_size,
            protocol_version=PROTOCOL_VERSION,
        )
        make = make_runner or (lambda kv: runner_of(config)(model, kv))
        runner = warmed_up(lambda: make(kv), config, samples=task.generates)
        return cls(
            files.model_id,
            shape.vocab_size,
            runner,
            kv,
            dtype,
            kv_dtype,
            model.quantization,
            fingerprint,
            weights_fingerprint(files.model_id, files.weights_hash, model.quantization),
            config.max_model_len or longest,
            num_threads,
            task,
        )


def runner_of(config: WorkerConfig) -> Callable[[RunnableModel, KVCache], ModelRunner]:
    """Makes what runs a model on a worker with these settings."""
    return lambda model, kv: decode_graphs(model, kv, config) or ModelRunner(model, kv)


def decode_graphs(model: RunnableModel, kv: KVCache, config: WorkerConfig) -> ModelRunner | None:
    """A runner of recorded decode steps for a decode worker with a CUDA device and Triton, else None."""
    if not isinstance(config, DecodeWorkerConfig) or not config.cuda_graphs or kv.device.type != "cuda":
        return None
    if triton_backend(kv.device.type) is None:
        return None
    # Imported here: it needs Triton, which a machine without a GPU may lack.
    from common.runner.graph_capture import GraphRecorder
    from common.runner.graph_runner import GraphRunner

    longest = config.max_model_len or model.config.max_model_len
    recorder = GraphRecorder(kv.device)
    return GraphRunner(model, kv, recorder, max_num_seqs=config.places, max_model_len=longest)


def native_dtype(device: str) -> str:
    """bfloat16 where the hardware multiplies it natively, else float32."""
    if device.startswith("cuda"):
        return "bfloat16"
    flags = Path("/proc/cpuinfo")
    text = flags.read_text(errors="replace") if flags.exists() else ""
    return "bfloat16" if "avx512_bf16" in text or "amx_bf16" in text else "float32"
