"""Main loop of ranks other than 0: load a shard, share its KV memory with rank 0, and run the steps that it sends."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import NoReturn

import msgspec
import torch

from common.engine.kv import KVCache
from common.engine.models import Decoder
from common.engine.ranks.adapters import RankPlaces, execute_adapter_orders
from common.engine.ranks.channel import Channel
from common.engine.ranks.group import RankGroup
from common.engine.ranks.kv_memory import share_kv_memory
from common.engine.ranks.liveness import send_heartbeats
from common.engine.ranks.processes import LOAD_S, SEND_S, RankPlan, RankReport
from common.engine.ranks.shard import load_shard, open_for_ranks
from common.engine.ranks.steps import StepExecutor
from common.engine.run import (
    CUDAMemory,
    ModelRunner,
    check_model_kernels,
    measure,
    reserve_step_copies,
    use_exact_sums,
)
from common.errors import DiptychError, ModelError, RankLost
from common.model_files.architecture import Shard
from kernels import KVScales

log = logging.getLogger(__name__)


def follow(plan: RankPlan, channel: Channel, orders: Channel) -> NoReturn:
    """Run steps until rank 0 is gone or a collective fails, which raises RankLost. Raises errors of loading and steps.

    One thread loads the adapters that `orders` name, another sends heartbeats.
    """
    torch.set_num_threads(plan.threads)
    use_exact_sums()
    try:
        steps, kv, places = prepare(plan, channel)
    except (DiptychError, OSError, torch.OutOfMemoryError) as error:
        channel.send(msgspec.json.encode(RankReport(str(error) or type(error).__name__)), SEND_S)
        raise
    if places is not None:
        threading.Thread(target=_execute_adapter_orders, args=(orders, places), name="adapters", daemon=True).start()
    channel.send(msgspec.json.encode(RankReport()), SEND_S)
    share_kv_memory(kv, channel)
    threading.Thread(target=send_heartbeats, args=(channel,), name="heartbeat", daemon=True).start()
    while True:
        steps.run(channel.receive(None))


def _execute_adapter_orders(orders: Channel, places: RankPlaces) -> None:
    with contextlib.suppress(RankLost):  # `watch` exits the process
        execute_adapter_orders(orders, places)


def prepare(plan: RankPlan, channel: Channel) -> tuple[StepExecutor, KVCache, RankPlaces | None]:
    """Load the shard, and allocate its KV cache and adapter slots. Raises ModelError, ConfigError, RankLost."""
    shard, device = Shard(plan.rank, plan.size), torch.device(plan.device)
    group = RankGroup(shard, plan.rendezvous, device)
    plan.need.check(plan.device)
    model = load_shard(
        plan.files,
        shard,
        group,
        dtype=plan.dtype,
        device=plan.device,
        quantization=plan.quantization,
        with_head=plan.with_head,
        batch_invariant=plan.batch_invariant,
    )
    reserve_step_copies(plan.largest, model.config, device)
    places = None
    if plan.max_loras:
        whole, _ = open_for_ranks(plan.files, plan.size)
        places = RankPlaces(model, whole, shard, max_loras=plan.max_loras, max_rank=plan.max_lora_rank)
    num_blocks = plan.num_blocks or _measured(plan, model, group, channel)
    shape, is_mapped = model.config, device.type == "cpu"
    scales = tuple(KVScales(*each) for each in plan.kv_scales)
    kv = KVCache(shape, num_blocks, plan.block_size, plan.kv_dtype, plan.device, share=is_mapped, scales=scales)
    if kv.shared is None and is_mapped:
        raise ModelError("this system does not support memory shared between processes: use --tensor-parallel-size 1")
    if plan.kernel_check:
        check_model_kernels(model, kv, samples=plan.with_head)
    log.info(
        "rank %d loaded its shard: %d KV heads, %d KV blocks, %d threads",
        plan.rank,
        shape.num_kv_heads,
        num_blocks,
        plan.threads,
    )
    return StepExecutor(ModelRunner(model, kv), group.spread), kv, places


def _measured(plan: RankPlan, model: Decoder, group: RankGroup, channel: Channel) -> int:
    """Return how many blocks fit on the device of every rank. Raises ConfigError or RankLost."""
    channel.send(msgspec.json.encode(RankReport()), SEND_S)
    channel.receive(LOAD_S)  # sent when all ranks have loaded
    memory = CUDAMemory(torch.device(plan.device))
    return measure(model, plan.largest, plan.kv_dtype, memory, least=group.least, draws=False)
