"""Loads the model of a tensor parallel worker: the shard of rank 0, and the processes of the other ranks."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace

import torch

from common.config import DecodeWorkerConfig, WorkerConfig
from common.engine.adapters import AdapterSlots
from common.engine.kv import KVCache, ShardedCache
from common.engine.models import kv_form
from common.engine.ranks.adapters import AllPlaces
from common.engine.ranks.group import COLLECTIVE_S, RankGroup
from common.engine.ranks.kv_memory import map_kv_memory
from common.engine.ranks.liveness import WaitDeadline
from common.engine.ranks.processes import RankPlan, RankProcesses
from common.engine.ranks.shard import load_shard, open_for_ranks
from common.engine.ranks.steps import RankedGraphRunner, RankedRunner
from common.engine.run import (
    CUDAMemory,
    DraftPlan,
    LargestSteps,
    LoadedModel,
    MemoryNeed,
    ModelFactories,
    ModelRunner,
    RunnableModel,
    WeightForm,
    add_score_head,
    blocks_left,
    blocks_within,
    check_model_kernels,
    native_dtype,
    recorder_for,
    records_steps,
    required_memory,
    runner_of,
    task_of,
    use_exact_sums,
)
from common.engine.weights.formats import KVCacheFormat
from common.model_files import ModelConfig, ModelFiles, ServedTask
from common.model_files.architecture import Shard

log = logging.getLogger(__name__)


def load_ranked(files: ModelFiles, config: WorkerConfig) -> LoadedModel:
    """Start the other ranks, load a shard in each process, and run the first steps.

    Raises ConfigError or ModelError for an unsupported model or setting, RankLost if a rank dies. No process is left in
    these cases.
    """
    size = config.tensor_parallel_size
    task = task_of(files, config)
    whole, _ = open_for_ranks(files, size)
    dtype = native_dtype(config.torch_device) if config.dtype == "auto" else config.dtype
    kv = kv_form(files, config.kv_cache_dtype, dtype).cut(whole.num_layers)
    draft = None
    if isinstance(config, DecodeWorkerConfig) and config.draft_model:
        draft = DraftPlan.of(files, config, dtype)
    form = WeightForm(dtype, config.torch_device, config.quantization, task.generates)
    need = required_memory(files, config, form, kv.dtype, draft)
    of_others = need if draft is None else required_memory(files, config, form, kv.dtype)
    need.check(config.torch_device, [of_others] * (size - 1))
    draft_bytes = draft.block_bytes if draft is not None else 0
    num_blocks = config.num_blocks
    if not num_blocks and config.kv_gib:
        num_blocks = blocks_within(Shard(0, size).of(whole), config, kv.dtype, draft_bytes)
    num_threads = max(1, (config.threads or len(os.sched_getaffinity(0))) // size)
    config = replace(config, threads=num_threads, num_blocks=num_blocks)
    others = RankProcesses(size)
    try:
        others.start(plans(files, config, task, dtype, kv, others.rendezvous_file, of_others))
        others.wait_started()
        group = RankGroup(Shard(0, size), others.rendezvous_file, torch.device(config.torch_device))
    except BaseException:
        others.close()
        raise
    ranks = Ranks(others, group, WaitDeadline(COLLECTIVE_S))
    try:
        loaded = _load(files, config, task, whole, ranks, dtype, kv, draft)
        others.delete_rendezvous()
        if draft is not None and isinstance(config, DecodeWorkerConfig):  # small, so only rank 0 runs it
            loaded = replace(loaded, draft=draft.load(config, loaded.kv.num_blocks, runner_of(config)))
        log.info("worker has %d ranks with %d threads and %d KV blocks each", size, num_threads, loaded.kv.num_blocks)
    except BaseException:
        ranks.close()
        raise
    return replace(loaded, others=ranks)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Implementation of `OtherRanks`: the processes, and the group of collectives."""

    processes: RankProcesses
    group: RankGroup
    deadline: WaitDeadline

    @property
    def failure(self) -> str:
        if why := self.processes.failure:
            return why
        why = self.deadline.failure
        return self.processes.with_silent_ranks(why) if why else ""

    def close(self) -> None:
        self.processes.close()
        self.group.close()


def plans(
    files: ModelFiles,
    config: WorkerConfig,
    task: ServedTask,
    dtype: str,
    kv: KVCacheFormat,
    rendezvous: str,
    need: MemoryNeed,
) -> list[RankPlan]:
    """Return the load plan of each other rank."""
    return [
        RankPlan(
            rank=rank,
            size=config.tensor_parallel_size,
            name=f"{config.worker_id or 'worker'}/rank-{rank}",
            files=files,
            dtype=dtype,
            kv_dtype=kv.dtype,
            kv_scales=kv.scales,
            quantization=config.quantization,
            with_head=task.generates,
            batch_invariant=config.batch_invariant,
            device=device_of(config.torch_device, rank),
            num_blocks=config.num_blocks,
            largest=LargestSteps.of(config, samples=task.generates),
            block_size=config.block_tokens,
            threads=config.threads,
            kernel_check=config.kernel_check,
            max_loras=config.lora_places,
            max_lora_rank=config.max_lora_rank,
            rendezvous=rendezvous,
            need=need,
            log_level=config.log_level,
            log_json=config.log_json,
        )
        for rank in range(1, config.tensor_parallel_size)
    ]


def device_of(device: str, rank: int) -> str:
    """Return the device of a rank. Ranks use consecutive GPUs, starting with the configured one."""
    if device == "cpu":
        return device
    return f"cuda:{int(device.partition(':')[2] or 0) + rank}"


def _load(
    files: ModelFiles,
    config: WorkerConfig,
    task: ServedTask,
    whole: ModelConfig,
    ranks: Ranks,
    dtype: str,
    form: KVCacheFormat,
    draft: DraftPlan | None,
) -> LoadedModel:
    others, size = ranks.processes, config.tensor_parallel_size
    torch.set_num_threads(config.threads)
    use_exact_sums()
    model = load_shard(
        files,
        Shard(0, size),
        ranks.group,
        dtype=dtype,
        device=config.torch_device,
        quantization=config.quantization,
        with_head=task.generates,
        batch_invariant=config.batch_invariant,
    )

    def cache(count: int) -> KVCache:
        return ShardedCache(whole, size, count, config.block_tokens, form.dtype, config.torch_device, form.scales)

    def joined(kv: KVCache) -> ModelRunner:
        assert isinstance(kv, ShardedCache)  # created by `cache`
        for rank in others.wait_ready():
            map_kv_memory(kv, rank.steps)
        if config.kernel_check:
            check_model_kernels(model, kv, samples=task.generates)
        return _ranked_runner(model, kv, config, ranks, whole.max_model_len)

    def places(max_loras: int, max_rank: int) -> AdapterSlots:
        return AllPlaces(model, whole, others.adapter_channels, max_loras=max_loras, max_rank=max_rank)

    def num_blocks(model: RunnableModel) -> int:
        if config.num_blocks:
            return config.num_blocks
        others.measure_together()
        memory, least = CUDAMemory(torch.device(config.torch_device)), ranks.group.least
        return blocks_left(model, config, form.dtype, memory, draft, samples=task.generates, least=least)

    loaded = LoadedModel.of(
        lambda: model, files, config, ModelFactories(joined, cache, places, num_blocks), task, form=form
    )
    return add_score_head(loaded, files, config)


def _ranked_runner(
    model: RunnableModel, kv: KVCache, config: WorkerConfig, ranks: Ranks, max_model_len: int
) -> ModelRunner:
    if not records_steps(config, kv.device):
        return RankedRunner(model, kv, ranks.processes, ranks.deadline)
    return RankedGraphRunner(
        model,
        kv,
        recorder_for(kv.device),
        ranks.processes,
        ranks.group.spread,
        ranks.deadline,
        max_num_seqs=config.places_within(kv.num_blocks * kv.block_size),
        max_model_len=config.max_model_len or max_model_len,
        adapts=config.lora_places > 0,
    )
