"""vLLM's KV connector of a Diptych worker: the scheduler's side, and the side of each rank.

The only module that relies on vLLM's internals. `tests/common/engine/vllm/test_vllm_internals.py` names each of them.

The scheduler's side follows the block tables of requests and passes orders to the ranks with each step. The rank's side
passes them to `RankTransfers`. Both are connected to the worker process by `WorkerLink`.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import RequestStatus

from common.engine.vllm.layout import KVGroup, KVLayout
from common.engine.vllm.link import SCHEDULER, ConnectorSettings, StepsDone, TransferParams, WorkerLink
from common.engine.vllm.rank_transfers import Computed, Key, LoadOrder, Open, RankTransfers, StepOrders, Tables
from common.engine.vllm.staging import RankCache, staging_bytes
from common.errors import ConfigError
from common.latency import NOTHING, StepShape
from common.machine import host_memory
from common.wire import Curve, Gatekeeper, allow_many_sockets

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = logging.getLogger(__name__)
REPORT_S = 0.1
"""Maximum time, in seconds, until a step that computed no prompt is reported to the worker."""


class DiptychConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # vLLM's types may not be installed
    """Forwards vLLM's calls to the side of its role."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._rank: RankSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(vllm_config, kv_cache_config)
        else:
            self._rank = RankSide(vllm_config, kv_cache_config)

    # ------------------------------------------------------------ the scheduler's side

    def on_new_request(self, request: Request) -> None:
        self.scheduler.add(request)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        num_tokens = self.scheduler.num_loadable(request, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        return StepMetadata(self.scheduler.step(scheduler_output, self._kv_cache_manager))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request), None

    def get_kv_connector_stats(self) -> None:
        """Record the step whose results the scheduler processes, which calls this once per step."""
        if self._scheduler is not None:
            self._scheduler.step_done(self._kv_cache_manager)

    # ------------------------------------------------------------ a rank's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.rank.start(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Obey all orders that precede the step. vLLM calls this before every step."""
        assert isinstance(kv_connector_metadata, StepMetadata)
        self.rank.transfers.before_step(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing: loads have started in `handle_preemptions`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: vLLM runs a request only after its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are sent after the step."""

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        self.rank.transfers.after_step(metadata.orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received, failed = self.rank.transfers.take_finished()
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)

    # ------------------------------------------------------------ both sides

    def shutdown(self) -> None:
        for side in (self._scheduler, self._rank):
            if side is not None:
                side.stop()

    @property
    def scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def rank(self) -> RankSide:
        assert self._rank is not None
        return self._rank


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Orders to all ranks for one step."""

    orders: StepOrders


# ---------------------------------------------------------------- the scheduler's side


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """A request of vLLM. Orders to the ranks cover the first `num_sent` tokens of its prompt."""

    request: Request
    params: TransferParams
    is_open: bool = False
    is_load_decided: bool = False
    is_grammar_advanced: bool = False
    num_sent: int = 0

    @property
    def key(self) -> Key:
        given = self.params.send or self.params.load
        assert given is not None
        return (given.request_id, given.attempt)


@dataclass(frozen=True, slots=True)
class _Step:
    shape: StepShape
    began_at: float
    num_preempted: int


class SchedulerSide:
    """Tracks the requests of an engine core, on its thread."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        settings = settings_of(vllm_config)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._link = WorkerLink(self._context, settings, SCHEDULER)
        self._link.start()
        groups = [_spec_of(group.kv_cache_spec) for group in kv_cache_config.transfer_groups]
        self._block_size = int(groups[0].block_size)
        self._num_scratch = [num_scratch_blocks(spec) for spec in groups]
        self._select = kv_cache_config.select_transfer_block_ids
        self._requests: dict[str, TrackedRequest] = {}
        self._orders = StepOrders()
        self._steps: deque[_Step] = deque()
        self._ended: list[tuple[StepShape, float]] = []
        self._ended_at = self._reported_at = 0.0
        self._num_preempted, self._counts = 0, (0, 0, 0)

    def stop(self) -> None:
        self._link.stop()
        self._context.term()

    def add(self, request: Request) -> None:
        """Track a new request."""
        try:
            params = TransferParams.of(request.kv_transfer_params)
        except msgspec.ValidationError as error:
            log.error("request %s: invalid kv_transfer_params, so no KV is transferred: %s", request.request_id, error)
            params = TransferParams()
        self._requests[request.request_id] = TrackedRequest(request, params)

    def num_loadable(self, request: Request, num_computed: int) -> int:
        """Return the number of tokens after the first `num_computed` whose KV has arrived."""
        tracked = self._requests[request.request_id]
        load = tracked.params.load
        if load is None or tracked.is_load_decided or load.num_tokens > request.num_tokens:
            return 0
        if num_computed < load.first_block * self._block_size:
            return 0  # the blocks that were cached are gone: compute the prompt
        return max(0, load.num_tokens - num_computed)

    def allocated(self, request: Request, tables: Sequence[Sequence[int]], num_loaded: int) -> None:
        """Decide once whether the KV that has arrived is loaded."""
        tracked = self._requests[request.request_id]
        load = tracked.params.load
        if load is not None and not tracked.is_load_decided:
            tracked.is_load_decided = True
            if num_loaded:
                num_cached = load.num_tokens - num_loaded
                chosen = self._transferred(tables)
                order = LoadOrder(request.request_id, tracked.key, load.num_tokens, num_cached, chosen)
                self._orders.loads.append(order)
            else:
                self._orders.unneeded.append(tracked.key)
        self._advance_grammar(tracked)

    def step(self, output: SchedulerOutput, manager: Any) -> StepOrders:
        """Return the orders of a step that was scheduled."""
        orders, self._orders = self._orders, StepOrders()
        for vllm_id in output.preempted_req_ids or ():
            tracked = self._requests.get(vllm_id)
            if tracked is not None and tracked.is_open:
                tracked.num_sent = 0
                orders.preempted.append(tracked.key)
        shape = NOTHING
        for vllm_id, num_tokens in output.num_scheduled_tokens.items():
            tracked = self._requests[vllm_id]
            shape += _shape_of(tracked.request, num_tokens)
            if tracked.params.send is not None:
                self._follow(tracked, num_tokens, orders, manager)
        self._steps.append(_Step(shape, time.monotonic(), len(output.preempted_req_ids or ())))
        return orders

    def step_done(self, manager: Any) -> None:
        """Report the oldest step in flight to the worker, together with later ones if nothing depends on it.

        Fewer messages leave the worker more time for tokens.
        """
        now, step = time.monotonic(), self._steps.popleft()
        began_at, self._ended_at = max(step.began_at, self._ended_at), now
        if step.shape != NOTHING:  # vLLM runs steps without tokens while transfers are pending
            self._ended.append((step.shape, now - began_at))
        self._num_preempted += step.num_preempted
        running = [each.request for each in self._requests.values() if each.request.status is RequestStatus.RUNNING]
        if running and not step.shape.num_tokens and now - self._reported_at < REPORT_S:
            return
        num_free_blocks = manager.block_pool.get_num_free_blocks()
        counts = (len(running), len(self._requests) - len(running), num_free_blocks)
        if not self._ended and not self._num_preempted and counts == self._counts:
            return
        steps, self._ended, self._counts, self._reported_at = tuple(self._ended), [], counts, now
        num_preempted, self._num_preempted = self._num_preempted, 0
        requests = [tracked.request for tracked in self._requests.values()]
        self._link.send(
            StepsDone(
                steps=steps,
                num_running=len(running),
                num_waiting=len(requests) - len(running),
                num_waiting_tokens=sum(max(0, each.num_prompt_tokens - each.num_computed_tokens) for each in requests),
                num_context_tokens=sum(each.num_computed_tokens for each in running),
                num_free_blocks=num_free_blocks,
                num_total_blocks=manager.block_pool.num_gpu_blocks - 1,  # without the null block
                num_preempted=num_preempted,
            )
        )

    def finished(self, request: Request) -> bool:
        """Stop tracking a request. Returns whether ranks may still read its blocks."""
        tracked = self._requests.pop(request.request_id)
        if tracked.params.load is not None and not tracked.is_load_decided:
            self._orders.unneeded.append(tracked.key)
        if not tracked.is_open:
            return False
        if request.status is RequestStatus.FINISHED_ABORTED:  # after other ends the worker sends Done or Cancel
            self._orders.cancelled.append(tracked.key)
        self._orders.finished.append((request.request_id, tracked.key))
        return True

    def _follow(self, tracked: TrackedRequest, num_tokens: int, orders: StepOrders, manager: Any) -> None:
        """Order the ranks to open the transfer of a prompt, and to send what the step computes."""
        request, send = tracked.request, tracked.params.send
        if send is None or tracked.num_sent >= request.num_prompt_tokens:
            return
        if not tracked.is_open:
            tracked.is_open = True
            orders.opens.append(Open(request.request_id, send, request.num_prompt_tokens))
        tracked.num_sent = min(request.num_prompt_tokens, request.num_computed_tokens + num_tokens)
        tables = self._transferred(manager.get_block_ids(request.request_id))
        orders.computed.append(Computed(tracked.key, tables, tracked.num_sent))

    def _transferred(self, tables: Sequence[Sequence[int]]) -> Tables:
        """Return the block tables of the groups that are transferred, without blocks for the states of drafts."""
        chosen = zip(self._select(tables), self._num_scratch, strict=True)
        return tuple(tuple(table[: max(1, len(table) - num_scratch)]) for table, num_scratch in chosen)

    def _advance_grammar(self, tracked: TrackedRequest) -> None:
        """Advance the request's grammar over the output at the end of its prompt, once."""
        request, num_earlier = tracked.request, tracked.params.earlier
        structured = request.structured_output_request
        if not num_earlier or structured is None or tracked.is_grammar_advanced:
            return
        tracked.is_grammar_advanced = True
        tokens = list(request.prompt_token_ids[-num_earlier:])
        if structured.grammar is None or not structured.grammar.accept_tokens(request.request_id, tokens):
            log.warning("request %s: its grammar does not allow its first %d tokens", request.request_id, num_earlier)


def _shape_of(request: Request, num_tokens: int) -> StepShape:
    """Return the work of a request in a step that is not counted in its computed tokens yet."""
    start = request.num_computed_tokens
    if num_tokens == 1 or start >= request.num_prompt_tokens:
        return StepShape.of_rows(1, start + num_tokens)
    return StepShape.of_prompt(start, start + num_tokens)


# ---------------------------------------------------------------- a rank's side


def keep_draws(runner_class: Any) -> None:
    """Let the first model runner draw from a request's generator only for tokens that count.

    After the first part of a prompt it draws a token, discards it and turns the generator back, which those of CPUs
    cannot do: any seeded request whose prompt takes two steps would end the process.
    """
    sample: Callable[..., Any] = runner_class.sample_tokens

    @functools.wraps(sample)
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        generators: dict[int, torch.Generator] = self.input_batch.generators
        if not generators:
            return sample(self, grammar_output)
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        set_aside = {row: generators.pop(row) for row in discarded if row in generators}
        try:
            return sample(self, grammar_output)
        finally:
            generators.update(set_aside)

    runner_class.sample_tokens = sample_tokens


@dataclass(slots=True)
class RankSide:
    """Transfers of one rank, which start when vLLM has allocated its cache."""

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    _context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context)
    _gatekeeper: Gatekeeper | None = None
    _link: WorkerLink | None = None
    _transfers: RankTransfers | None = None

    @property
    def transfers(self) -> RankTransfers:
        assert self._transfers is not None
        return self._transfers

    def start(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises ConfigError if the model's KV cannot be transferred."""
        if self.vllm_config.device_config.device_type == "cpu":
            from vllm.v1.worker.cpu_model_runner import CPUModelRunner

            keep_draws(CPUModelRunner)
        allow_many_sockets(self._context)
        settings = settings_of(self.vllm_config)
        curve = Curve.load(settings.curve_key, settings.curve_authorized)
        if curve is not None:
            self._gatekeeper = Gatekeeper(self._context, curve)
            self._gatekeeper.start()
        layout, groups = describe(self.vllm_config, self.kv_cache_config, kv_caches)
        rank = layout.stage * layout.size + layout.rank
        link = self._link = WorkerLink(self._context, settings, rank, lambda message: transfers.order(message))
        cache = RankCache(layout, groups, self.kv_cache_config.num_blocks)
        world_size = layout.size * layout.num_stages
        if not settings.staging_bytes:
            longest = self.vllm_config.model_config.max_model_len if settings.receives else 0
            memory, num_here = host_memory(), self.vllm_config.parallel_config.local_world_size
            memory_bytes = memory.num_bytes / num_here if memory is not None else math.inf
            size = staging_bytes(cache, longest, memory_bytes)
            settings = msgspec.structs.replace(settings, staging_bytes=size)
        transfers = RankTransfers(self._context, settings, cache, link.send, world_size=world_size, curve=curve)
        self._transfers = transfers
        link.start()
        transfers.start()

    def stop(self) -> None:
        if self._link is not None:
            self._link.stop()
        if self._transfers is not None:
            self._transfers.stop()
        if self._gatekeeper is not None:
            self._gatekeeper.stop()
        self._context.term()


def settings_of(vllm_config: VllmConfig) -> ConnectorSettings:
    """Return the settings that the worker has passed. Raises ConfigError."""
    return ConnectorSettings.of(vllm_config.kv_transfer_config.kv_connector_extra_config)


def describe(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: dict[str, torch.Tensor]
) -> tuple[KVLayout, list[list[torch.Tensor]]]:
    """Return the layout of this rank's KV, and the layers of each group. Raises ConfigError if it is not supported."""
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            raise ConfigError(
                name, getattr(parallel, name), "1, because KV is not transferred between parts of a context"
            )
    tensor, pipeline = get_tp_group(), get_pp_group()
    groups: list[KVGroup] = []
    layers: list[list[torch.Tensor]] = []
    for group in kv_cache_config.transfer_groups:
        found = [kv_caches[name] for name in group.layer_names if name in kv_caches]
        if found:
            groups.append(
                _group_of(_spec_of(group.kv_cache_spec), found, kv_cache_config.num_blocks, tensor, vllm_config)
            )
            layers.append(found)
    dtypes = sorted({str(layer.dtype).removeprefix("torch.") for found in layers for layer in found})
    if {"int8", "uint8"} & set(dtypes):  # bytes of a quantised format, or of recurrent states
        cache = vllm_config.cache_config
        dtypes += [cache.cache_dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype]
        dtypes.append(str(vllm_config.model_config.dtype).removeprefix("torch."))
    dtype = "/".join(dtypes)
    stage, num_stages = pipeline.rank_in_group, pipeline.world_size
    return KVLayout(tuple(groups), dtype, tensor.world_size, tensor.rank_in_group, num_stages, stage), layers


def num_scratch_blocks(spec: KVCacheSpec) -> int:
    """Return the number of blocks at the end of a request's table that hold its states after each token of a draft."""
    return int(spec.num_speculative_blocks) if isinstance(spec, MambaSpec) else 0


def _spec_of(spec: KVCacheSpec) -> KVCacheSpec:
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _group_of(
    spec: KVCacheSpec, layers: Sequence[torch.Tensor], num_blocks: int, tensor: Any, vllm_config: VllmConfig
) -> KVGroup:
    heads = {int(layer.shape[1]) for layer in layers}
    if len(heads) > 1:
        raise ConfigError("model", vllm_config.model_config.model, "one whose layers have equal numbers of KV heads")
    (num_heads,) = heads
    head_bytes = sum(layer.itemsize * math.prod(layer.shape) for layer in layers) // (num_blocks * num_heads)
    size = int(spec.block_size)
    if isinstance(spec, MambaSpec):
        return KVGroup("state", size, num_heads * tensor.world_size, head_bytes)
    num_heads = _heads_of_model(spec, num_heads, tensor.world_size, vllm_config)
    if isinstance(spec, SlidingWindowSpec):
        return KVGroup("window", size, num_heads, head_bytes, int(spec.sliding_window))
    if isinstance(spec, FullAttentionSpec):
        return KVGroup("full", size, num_heads, head_bytes)
    raise ConfigError("model", vllm_config.model_config.model, f"one without KV of type {type(spec).__name__}")


def _heads_of_model(spec: KVCacheSpec, num_heads: int, size: int, vllm_config: VllmConfig) -> int:
    """Return the KV heads of all ranks, given those of a rank. Raises ConfigError if they cannot be known."""
    if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        return 1
    if size == 1:
        return num_heads
    total = int(vllm_config.model_config.get_total_num_kv_heads())
    if num_heads != max(1, total // size):
        what = "a model whose layers have equal numbers of KV heads, with several tensor parallel ranks"
        raise ConfigError("model", vllm_config.model_config.model, what)
    return total
