"""A model that vLLM has loaded: its processes, the link to its ranks, its prefix cache, adapters and metrics.

worker's event loop ── Engine.submit ──> engine thread (asyncio): AsyncLLM, RankLink, block events, VllmEngine
                                             └── processes of vLLM: engine core, ranks
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import uvloop
import zmq
import zmq.asyncio
from prometheus_client import REGISTRY
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from common.config import WorkerConfig
from common.engine.kv import BlockLog
from common.engine.vllm.adapters import VllmAdapters
from common.engine.vllm.block_events import CachedBlocks
from common.engine.vllm.client import Added, CoreDied, DraftCounter, VllmClient
from common.engine.vllm.core_log import last_error
from common.engine.vllm.hosts import EngineHosts, FollowerPlan
from common.engine.vllm.launch import (
    KV_SPACE,
    CoreFiles,
    end_processes,
    engine_arguments,
    engine_config,
    kill_processes,
    prepare_files,
    prepare_memory,
    process_tree,
    start_core,
    start_problem,
)
from common.engine.vllm.layout import can_skip_blocks
from common.engine.vllm.link import (
    SCHEDULER,
    ConnectorSettings,
    LinkEvent,
    RankLink,
    RankReady,
    TransferParams,
    joined_addresses,
)
from common.engine.worker import ModelFacts, WorkerMetrics, WorkerParts
from common.errors import ConfigError, ModelError
from common.machine import PrivateFolder
from common.model_files import ModelFiles, ServedTask, served_task, weights_fingerprint
from common.wire import Pooling, SamplingParams, in_url

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)
T = TypeVar("T")
READY_S = 60.0
"""Maximum time, in seconds, until all ranks have connected, once vLLM has loaded the model."""
LINK_SILENCE_S = 60.0
"""Time, in seconds, without a sign of the worker after which vLLM's processes exit. Only a worker that hangs takes so
long: they detect the end of their parent process earlier."""
SHUTDOWN_S = 1.0
"""Time, in seconds, that vLLM's processes get to end by themselves. They only free memory, for up to 4 s."""
CALL_S = 30.0
"""Maximum time, in seconds, of a call to vLLM that needs no step."""
WARM_UP_S = 300.0
"""Maximum time, in seconds, of the first request."""
BLOCK_SIZES = re.compile(r"heads=(\d+) head_bytes=(\d+)")
"""Sizes of a block's parts in the description of a layout."""
ROLE_SETTINGS = {
    "kv_port": "kv_port",
    "grant_timeout_s": "grant_timeout_s",
    "transfer_timeout_s": "transfer_timeout_s",
    "kv_streams": "num_streams",
    "kv_lease_s": "lease_s",
}
"""Settings of one role, and their names in `ConnectorSettings`."""
EVENTS_HWM = 100_000
"""Batches of block events that ZeroMQ queues."""


class CoreThread:
    """The engine thread: an event loop for everything that talks to vLLM."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.failure = ""
        """Why a task of `keep` has died, or ""."""
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine on the thread and wait for it. Raises TimeoutError."""
        return self.submit(coroutine).result(timeout_s)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def keep(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task that is cancelled by `close`. On the thread only."""
        task = self.loop.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("vllm: the task %r has died", task.get_name(), exc_info=error)
            self.failure = f"the task {task.get_name()!r} has died: {type(error).__name__}: {error}"

    def close(self, timeout_s: float = 5.0) -> bool:
        """Cancel all tasks and end the thread. Returns False if it still runs."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            if left:
                self.loop.run_until_complete(asyncio.wait(left, timeout=1.0))
        finally:
            self.loop.close()


class VllmModel:
    """A model loaded by vLLM, with everything that outlives an engine of ours. One engine uses it."""

    def __init__(
        self,
        thread: CoreThread,
        llm: AsyncLLM,
        link: RankLink,
        cached: CachedBlocks,
        facts: ModelFacts,
        files: CoreFiles,
        folder: PrivateFolder,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        pooling: Pooling,
        kv_address: str,
        adapters: VllmAdapters | None,
        hosts: EngineHosts | None,
        ranks: Sequence[RankReady],
    ) -> None:
        self.thread, self.link, self.cached = thread, link, cached
        self.client = VllmClient(llm)
        self._llm = llm
        self.facts, self.vocab_size, self.eos_token_ids, self.pooling = facts, vocab_size, eos_token_ids, pooling
        self.kv_address, self.adapters, self._hosts = kv_address, adapters, hosts
        self._rooms = {(one.groups, one.num_slots): one for one in ranks}.values()
        self.on_event: Callable[[int, LinkEvent], None] = lambda rank, event: None
        """Receives the events of ranks and scheduler, on the engine thread. Set by the engine."""
        self._files, self._folder = files, folder
        self._processes = process_tree()
        self._errors_offset = files.errors.stat().st_size if files.errors.exists() else 0

    @property
    def speculates(self) -> bool:
        return self._llm.vllm_config.speculative_config is not None

    @property
    def has_first_runner(self) -> bool:
        return not self._llm.vllm_config.use_v2_model_runner

    @property
    def world_size(self) -> int:
        return int(self._llm.vllm_config.parallel_config.world_size)

    def fits(self, num_tokens: int, first_block: int) -> bool:
        """Whether the staging memory of all ranks can store the KV of a prompt without its first blocks."""
        return all(room.fits(num_tokens, first_block) for room in self._rooms)

    def num_skipped(self, num_cached: int) -> int:
        """Return how many of the cached blocks at the beginning of a prompt need not be received.

        Those that vLLM will use whatever else it has cached: none if it needs another group's KV at the same place, and
        not the last one if a draft model computes it again.
        """
        if not all(can_skip_blocks(room.groups) for room in self._rooms):
            return 0
        speculation = self._llm.vllm_config.speculative_config
        drops_last = speculation is not None and speculation.use_eagle_block_drop()
        return max(0, num_cached - 1) if drops_last else num_cached

    @property
    def failure(self) -> str:
        return self._hosts.failure if self._hosts is not None else ""  # other reasons are the engine's

    @property
    def is_leaving(self) -> bool:
        return self._hosts is not None and self._hosts.is_leaving

    def core_problem(self) -> str:
        """Return why vLLM's engine core has died."""
        return (
            self.failure
            or f"vLLM has failed: {last_error(self._files.errors, self._errors_offset) or 'a process has exited'}"
        )

    def register_metrics(self, metrics: WorkerMetrics) -> None:
        metrics.register(VllmCollector)

    def close(self) -> None:
        """End vLLM's processes and the engine thread. Does not wait until killed processes have freed their memory."""
        logging.getLogger("vllm").setLevel(logging.ERROR)  # it warns of each process that it has to kill
        with contextlib.suppress(Exception):  # whatever fails, the processes are ended below
            self.thread.call(_cancelled(self._llm.output_handler), 1.0)
            self._llm.shutdown(timeout=SHUTDOWN_S)
        if self._hosts is not None:
            self._hosts.close()
        kill_processes(self._processes & process_tree())
        self.thread.close()
        self._folder.close()


async def _cancelled(task: asyncio.Task[Any] | None) -> None:
    """Cancel vLLM's reader of outputs, which would log the end of the engine core as an error."""
    if task is not None:
        task.cancel()
        await asyncio.wait({task}, timeout=0.5)


def load_vllm(files: ModelFiles, config: WorkerConfig, parts: WorkerParts, block_log: BlockLog) -> VllmModel:
    """Start vLLM and load the model. Blocks. Raises ConfigError or ModelError, RankLost if a host does not join."""
    task = served_task(files, config.task)
    if not task.generates and parts.identity.role == "decode":
        raise ModelError(f"{files.model_id} does not generate text: only prefill workers serve it")
    folder = PrivateFolder("vllm")
    prepare_files(config.log_level, CoreFiles(folder.path))
    prepare_memory(config)
    log.info("vllm: reading the configuration of %s", files.model_id)
    thread = CoreThread()
    before, hosts = process_tree(), None
    try:
        hosts = EngineHosts.wait(config)
        return _load(files, task, config, parts, block_log, folder, thread, hosts)
    except BaseException:
        if hosts is not None:
            hosts.close()
        end_processes(process_tree() - before)
        thread.close()
        folder.close()
        raise


def _load(
    files: ModelFiles,
    task: ServedTask,
    config: WorkerConfig,
    parts: WorkerParts,
    block_log: BlockLog,
    folder: PrivateFolder,
    thread: CoreThread,
    hosts: EngineHosts | None,
) -> VllmModel:
    core_files, ranks = CoreFiles(folder.path), _Ranks()
    context = zmq.asyncio.Context(parts.context)  # on the sockets' threads of this process
    link, link_address = thread.call(_linked(thread, context, ranks, config, parts, hosts), CALL_S)
    settings = connector_settings(config, parts, link_address, link.key)
    arguments = engine_arguments(config, files, task)
    of_host = hosts.arguments() if hosts is not None else ()
    vllm_config = engine_config([*arguments, *of_host], core_files, settings.extra_config())
    check_drafts(vllm_config)
    weights = weights_of(files, vllm_config)
    settings = msgspec.structs.replace(settings, weights=weights)
    vllm_config.kv_transfer_config.kv_connector_extra_config.update(settings.extra_config())
    world_size = int(vllm_config.parallel_config.world_size)
    drafts = DraftCounter()
    if hosts is None:
        llm, shown = start_core(vllm_config, core_files, drafts), [config.advertise_host] * world_size
    else:
        hosts.start(_plan(files, config, arguments, settings))
        llm, shown = (
            start_core(vllm_config, core_files, drafts, lambda: hosts.failure),
            hosts.advertised(config.advertise_host, world_size),
        )
    ready = thread.call(ranks.all(world_size), READY_S + 1.0)
    ends = _ends(files, llm)
    try:
        thread.call(_warmed_up(VllmClient(llm), ends, task.pooling), WARM_UP_S)
    except CoreDied as error:
        raise ModelError(start_problem(error, core_files)) from error
    core_files.loaded.touch()
    drafts.metrics = parts.metrics.drafts
    facts = facts_of(files, vllm_config, weights, ready[0].layout)
    cached = CachedBlocks(facts.block_size, block_log)
    adapters = VllmAdapters(llm, thread.loop, config.lora_places) if config.lora_places else None
    model = VllmModel(
        thread,
        llm,
        link,
        cached,
        facts,
        core_files,
        folder,
        vocab_size=int(vllm_config.model_config.get_vocab_size()),
        eos_token_ids=ends,
        pooling=task.pooling,
        kv_address=advertised([one.kv_address for one in ready], shown),
        adapters=adapters,
        hosts=hosts,
        ranks=ready,
    )
    ranks.forward = lambda rank, event: model.on_event(rank, event)
    if config.enable_prefix_caching:
        thread.call(_reading(thread, context, core_files.events_address, cached), CALL_S)
    return model


def check_drafts(config: VllmConfig) -> None:
    """Raise ConfigError for drafts with recurrent state on CPUs, where they change vLLM's own answers.

    Its kernels for CPUs need the same number of drafts in every step. After fewer, they read the wrong state.
    """
    drafts, is_cpu = config.speculative_config, config.device_config.device_type == "cpu"
    if drafts is not None and config.model_config.is_hybrid and is_cpu:
        raise ConfigError("speculative_config", drafts.method, "omitted on CPUs for a model with recurrent state")


def connector_settings(
    config: WorkerConfig, parts: WorkerParts, link_address: str, link_key: bytes
) -> ConnectorSettings:
    """Return the settings of the connectors, before the weights are known."""
    of_role = {
        setting: getattr(config, name)
        for name, setting in ROLE_SETTINGS.items()
        if hasattr(config, name)  # of the other role
    }
    return ConnectorSettings(
        link_address=link_address,
        link_key=link_key.hex(),
        silence_s=LINK_SILENCE_S,
        worker_id=parts.identity.worker_id,
        epoch=parts.identity.epoch,
        weights="",
        kv_host=config.host,
        kv_transport=config.kv_transport,
        receives=parts.identity.role == "decode",
        curve_key=config.curve_key,
        curve_authorized=config.curve_authorized,
        **of_role,
    )


def _ends(files: ModelFiles, llm: AsyncLLM) -> tuple[int, ...]:
    """Return the tokens that end an answer: those of the model's files, and vLLM's, which ends grammars."""
    own = getattr(llm.tokenizer, "eos_token_id", None)
    return tuple(dict.fromkeys([*files.eos_token_ids, *([own] if own is not None else [])]))


async def _warmed_up(client: VllmClient, ends: tuple[int, ...], pooling: Pooling) -> None:
    """Compute one token with log probabilities, for which vLLM compiles code, during which no request progresses."""
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1, pooling=pooling)
    answer = await client.add(Added("warm-up", [0], params, ends, TransferParams()))
    while not (await answer.next()).reason:
        pass


class _Ranks:
    """Collects `RankReady` of all ranks, and forwards later messages."""

    def __init__(self) -> None:
        self._ready: dict[int, RankReady] = {}
        self._changed = asyncio.Event()
        self.forward: Callable[[int, LinkEvent], None] = lambda rank, event: None

    def on_message(self, rank: int, message: RankReady | LinkEvent) -> None:
        if isinstance(message, RankReady):
            self._ready[rank] = message
            self._changed.set()
        else:
            self.forward(rank, message)

    async def all(self, world_size: int) -> list[RankReady]:
        """Wait for all ranks. Raises ModelError."""
        try:
            async with asyncio.timeout(READY_S):
                while len(self._ready) < world_size:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise ModelError(
                f"vLLM has loaded the model, but {world_size - len(self._ready)} of {world_size} ranks did not connect "
                f"to the worker within {READY_S:g} s"
            ) from error
        return [self._ready[rank] for rank in sorted(self._ready) if rank != SCHEDULER]


def _plan(
    files: ModelFiles, config: WorkerConfig, arguments: Sequence[str], settings: ConnectorSettings
) -> FollowerPlan:
    """Return the plan of the other hosts, without the key of the link."""
    assert files.config is not None  # checked by `engine_arguments`
    return FollowerPlan(
        arguments=tuple(arguments),
        model=str(files.config.parent),
        settings=msgspec.structs.replace(settings, link_key=""),
        link_nonce=b"",
        weights_hash=files.weights_hash,
        on_gpu=config.on_gpu,
        num_ranks=config.ranks_per_host,
        kv_space=os.environ.get(KV_SPACE, ""),
        log_level=config.log_level,
        log_json=config.log_json,
    )


def advertised(addresses: Sequence[str], hosts: Sequence[str]) -> str:
    """Join the ranks' KV addresses, each with the given host, unless that is ""."""
    ports = [address.rpartition(":")[2] for address in addresses]
    shown = zip(addresses, hosts, ports, strict=True)
    return joined_addresses([f"tcp://{in_url(host)}:{port}" if host else address for address, host, port in shown])


async def _linked(
    thread: CoreThread,
    context: zmq.asyncio.Context,
    ranks: _Ranks,
    config: WorkerConfig,
    parts: WorkerParts,
    hosts: EngineHosts | None,
) -> tuple[RankLink, str]:
    """Return the link and the address at which ranks connect to it."""
    if hosts is None:
        link = RankLink(context, ranks.on_message)
        address = link.address
    else:
        link = RankLink(context, ranks.on_message, host=config.host, curve=parts.curve, key=hosts.link_key)
        address = f"tcp://{in_url(hosts.address)}:{link.address.rpartition(':')[2]}"
    thread.keep(_running(link), "rank link")
    return link, address


async def _running(link: RankLink) -> None:
    """Run a link until cancelled, and close its socket, without which the process could not end."""
    try:
        await link.run()
    finally:
        link.close()


async def _reading(thread: CoreThread, context: zmq.asyncio.Context, address: str, cached: CachedBlocks) -> None:
    socket = context.socket(zmq.SUB)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.RCVHWM, EVENTS_HWM)
    socket.set(zmq.SUBSCRIBE, b"")
    socket.connect(address)
    thread.keep(_read_events(socket, cached), "block events")


async def _read_events(socket: zmq.asyncio.Socket, cached: CachedBlocks) -> None:
    try:
        while True:
            _, number, packed = await socket.recv_multipart()
            try:
                cached.on_batch(int.from_bytes(number, "big"), packed)
            except msgspec.MsgspecError:
                log.exception("vllm: invalid block events, forgetting the prefix cache")
                cached.clear()
    finally:
        socket.close()


def weights_of(files: ModelFiles, config: VllmConfig) -> str:
    """Return the fingerprint of model, weights and the numbers that vLLM computes with."""
    model = config.model_config
    return weights_fingerprint(
        files.model_id, files.weights_hash, f"vllm/{_dtype(model.dtype)}/{model.quantization or 'none'}"
    )


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def facts_of(files: ModelFiles, config: VllmConfig, weights: str, layout: str) -> ModelFacts:
    """Return the facts of a loaded model. `layout`: that of its ranks' KV."""
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    dtype = _dtype(model.dtype)
    kv_dtype = dtype if cache.cache_dtype == "auto" else str(cache.cache_dtype)
    quantization = str(model.quantization or "none")
    precision = dtype if quantization == "none" else f"{dtype} with {quantization} weights"
    return ModelFacts(
        model_id=files.model_id,
        fingerprint=blake2b(f"{weights}/{layout}".encode(), digest_size=16).hexdigest(),
        weights=weights,
        max_model_len=int(model.max_model_len),
        block_size=int(cache.block_size),
        num_blocks=max(0, int(cache.num_gpu_blocks or 0) - 1),  # without the null block, which no request gets
        block_bytes=sum(int(heads) * int(size) for heads, size in BLOCK_SIZES.findall(layout)),
        precision=f"{precision} with vLLM",
        kv_dtype=kv_dtype,
        resources=f"{config.parallel_config.world_size} ranks" if config.parallel_config.world_size > 1 else "",
        layout=(
            ("engine", "vllm"),
            ("dtype", dtype),
            ("kv_cache_dtype", kv_dtype),
            ("quantization", quantization),
            ("kv_layout", layout[:200]),
        ),
        max_num_seqs=int(scheduler.max_num_seqs),
        max_step_tokens=int(scheduler.max_num_batched_tokens),
        changes_role=False,
        hands_over=False,
    )


class VllmCollector(Collector):
    """vLLM's own series, except those that workers of every engine export, with the labels of this worker."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)

    def collect(self) -> Iterator[Metric]:
        for family in REGISTRY.collect():
            if not family.name.startswith("vllm:") or family.name in COMMON_SERIES:
                continue
            renamed = Metric(family.name, family.documentation, family.type)
            renamed.samples = [sample._replace(labels={**sample.labels, **self._labels}) for sample in family.samples]
            yield renamed


COMMON_SERIES = frozenset(
    {
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
        *("vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds"),
        *("vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:prompt_tokens", "vllm:generation_tokens"),
        *("vllm:num_preemptions", "vllm:request_success", "vllm:cache_config_info"),
        *("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"),
        "vllm:spec_decode_num_accepted_tokens_per_pos",
    }
)
"""Series of `WorkerMetrics`, which Diptych counts itself."""
