"""A rank other than 0: it loads its shard, lends its KV memory to rank 0, and runs the steps that rank 0 sends."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import NoReturn

import msgspec
import torch

from common.errors import DiptychError, ModelError, RankLost
from common.kv.cache import KVCache
from common.model_config.shard import Shard
from common.ranks.adapters import RankPlaces, take_adapters
from common.ranks.channel import Channel
from common.ranks.followed_steps import FollowedSteps
from common.ranks.group import RankGroup
from common.ranks.kv_memory import lend
from common.ranks.load_shard import load_shard, open_for_ranks
from common.ranks.processes import SEND_S, RankPlan, RankReport
from common.runner.kernel_check import check_model_kernels
from common.runner.loaded import compute_exactly
from common.runner.runner import ModelRunner

log = logging.getLogger(__name__)


def follow(plan: RankPlan, channel: Channel, orders: Channel) -> NoReturn:
    """Runs steps until rank 0 is gone: RankLost then, or when a sum fails. Raises errors of loading and of steps.

    Beside that a thread loads the adapters that `orders` name.
    """
    torch.set_num_threads(plan.threads)
    compute_exactly()
    try:
        steps, kv, places = prepare(plan)
    except (DiptychError, OSError) as error:
        channel.send(msgspec.json.encode(RankReport(str(error) or type(error).__name__)), SEND_S)
        raise
    if places is not None:
        threading.Thread(target=_take_adapters, args=(orders, places), name="adapters", daemon=True).start()
    channel.send(msgspec.json.encode(RankReport()), SEND_S)
    lend(kv, channel)
    while True:
        steps.run(channel.receive(None))


def _take_adapters(orders: Channel, places: RankPlaces) -> None:
    with contextlib.suppress(RankLost):  # then this process ends: see `watch`
        take_adapters(orders, places)


def prepare(plan: RankPlan) -> tuple[FollowedSteps, KVCache, RankPlaces | None]:
    """Loads the shard, and allocates its KV cache and places for adapters. Raises ModelError, ConfigError, RankLost."""
    shard, device = Shard(plan.rank, plan.size), torch.device(plan.device)
    group = RankGroup(shard, plan.meeting_file, device)
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
    shape = model.config
    kv = KVCache(shape, plan.num_blocks, plan.block_size, plan.kv_dtype, plan.device, share=device.type == "cpu")
    if kv.shared is None and device.type == "cpu":
        raise ModelError("this system has no memory that processes can share: take tensor_parallel_size 1")
    if plan.kernel_check:
        check_model_kernels(model, kv, samples=plan.with_head)
    log.info("has its shard: %d KV heads, %d blocks, %d threads", shape.num_kv_heads, plan.num_blocks, plan.threads)
    places = None
    if plan.max_loras:
        whole, _ = open_for_ranks(plan.files, plan.size)
        places = RankPlaces(model, whole, shard, max_loras=plan.max_loras, max_rank=plan.max_lora_rank)
    return FollowedSteps(ModelRunner(model, kv), group.spread), kv, places
