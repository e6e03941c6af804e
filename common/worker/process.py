"""The life of a worker process, of either kind:

bind sockets ─> write --address-file ─> load the model (not ready) ─> run the engine (ready) ─> SIGTERM: drain ─> exit 0
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import zmq
import zmq.asyncio

from common.config import WorkerConfig
from common.errors import ConfigError, DiptychError, ModelError
from common.kv.block_log import BlockLog
from common.kv.block_pool import BlockPool
from common.machine.allocator import keep_large_buffers
from common.machine.core_share import CoreShare
from common.machine.file_limit import raise_file_limit
from common.model_files.files import ModelFiles
from common.model_files.resolve import resolve_model
from common.transfer.outgoing import TransferEnded
from common.transfer.sender import KVSender
from common.wire.curve import Curve, warn_of_readers
from common.wire.gatekeeper import Gatekeeper
from common.wire.listening import in_url
from common.wire.messages import AnyMessage, DecodeRequest, PrefillRequest, RequestFailed, WorkerHeartbeat
from common.worker.control import ControlServer, bind_control
from common.worker.engine import Engine, EngineConfig, EngineStatus, RequestReceived, RouterLost, Send
from common.worker.metrics import WorkerMetrics
from common.worker.probes import WorkerHTTP
from common.worker.step_times import DEVICE_FLOOR_S, FLOOR_S, StepTimes
from common.worker.vitals import WorkerIdentity, heartbeat_of, hello_of, probe_of

if TYPE_CHECKING:
    from common.grammar.grammars import Grammars
    from common.runner.loaded import LoadedModel

log = logging.getLogger(__name__)
DRAIN_POLL_S = 0.02
LAST_WORDS_MS = 500
"""Time at the end for the last messages to routers to leave."""


class WorkerProcess:
    """Runs one engine behind one control socket. Subclasses bind their KV socket and build the engine."""

    role = ""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.identity = WorkerIdentity.create(self.role, config.worker_id)
        self.block_log = BlockLog(self.identity.epoch)
        self.context = zmq.asyncio.Context()
        self.blocking_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self.context)
        self.metrics = WorkerMetrics(
            config.model,
            self.identity.worker_id,
            self._status,
            role=self.role,
            slo_tpot_s=getattr(config, "slo_tpot_ms", 0.0) / 1e3,
        )
        self.curve = Curve.load(config.curve_key, config.curve_authorized)
        self.gatekeeper: Gatekeeper | None = None
        self.control: ControlServer | None = None
        self.engine: Engine | None = None
        self.loaded: LoadedModel | None = None
        self.kv_address = ""
        self._draining = False

    def bind_kv(self) -> str:
        """Bind the KV socket if this role has one, and return its address. Called before the model is loaded."""
        return ""

    def close_kv(self) -> None:
        """Close what `bind_kv` bound, when no engine took it over."""

    def build_engine(self, files: ModelFiles, loaded: LoadedModel, grammars: Grammars, send: Send) -> Engine:
        """The engine, not started. It owns `grammars`."""
        raise AssertionError("a worker process has a role")

    def engine_config(self, files: ModelFiles, loaded: LoadedModel) -> EngineConfig:
        return EngineConfig(
            identity=(self.identity.worker_id, self.identity.epoch),
            eos_token_ids=files.eos_token_ids,
            max_model_len=loaded.max_model_len,
            max_waiting=self.config.max_waiting,
        )

    def new_pool(self, loaded: LoadedModel) -> BlockPool:
        return BlockPool(
            loaded.kv.num_blocks,
            loaded.kv.block_size,
            enable_prefix_caching=self.config.enable_prefix_caching,
            log=self.block_log,
        )

    def new_sender(self, loaded: LoadedModel, on_ended: Callable[[TransferEnded], None], **options: Any) -> KVSender:
        """Ships blocks of this worker's cache; `options` are the settings of `KVSender` that differ by role."""
        from common.kv.staging import outgoing_blocks  # which imports torch, as the model has by now

        return KVSender(
            self.blocking_context,
            outgoing_blocks(loaded.kv).view,
            loaded.kv.block_bytes,
            (self.identity.worker_id, self.identity.epoch, loaded.fingerprint),
            on_ended,
            memory=loaded.kv.shared.offer if loaded.kv.shared else None,
            require_shared=self.config.kv_transport == "shm",
            curve=self.curve,
            **options,
        )

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT; raises the error that ended the engine."""
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, stop)
        control, http = await self._listen()
        serving = asyncio.create_task(control.run(), name="control")
        stopped = asyncio.create_task(stop.wait(), name="stop")
        tending = self._tend_pod()
        try:
            loading = asyncio.create_task(self._start_engine(control), name="loading")
            await asyncio.wait({loading, serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                self._abandon_loading(serving)
            loading.result()
            watch = asyncio.create_task(self._watch_engine(), name="watch")
            await asyncio.wait({serving, stopped, watch}, return_when=asyncio.FIRST_COMPLETED)
            for task in (serving, watch):
                if task.done():
                    task.result()
            await self._drain(control, serving)
            watch.cancel()
        finally:
            serving.cancel()
            stopped.cancel()
            if tending is not None:
                tending.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await self._close(http)

    async def _listen(self) -> tuple[ControlServer, WorkerHTTP]:
        """Bind all sockets and tell their addresses. The control server does not run yet."""
        config = self.config
        if self.curve is not None:
            warn_of_readers(config.curve_key)
            self.gatekeeper = Gatekeeper(self.blocking_context, self.curve)
            self.gatekeeper.start()
        control_socket, address = bind_control(self.context, config.host, config.port, self.curve)
        self.kv_address = self._advertised(self.bind_kv())
        http = WorkerHTTP(
            config.host,
            config.http_port,
            lambda: probe_of(self.identity, self.engine, draining=self._draining),
            self.metrics.registry,
        )
        http_port = await http.start()
        self._write_address_file(self._advertised(address), http_port)
        self.control = ControlServer(
            control_socket,
            lambda: hello_of(self.identity, config, self.loaded, self.kv_address),
            self._heartbeat,
            self._on_message,
            self._on_router_lost,
            heartbeat_s=config.heartbeat_s,
            router_timeout_s=config.router_timeout_s,
            blocks=self.block_log,
        )
        log.info("%s listens on %s", self.identity.worker_id, address, extra={"kv": self.kv_address, "http": http_port})
        return self.control, http

    async def _close(self, http: WorkerHTTP) -> None:
        """End the engine and all threads, and close the sockets."""
        has_ended = True
        if self.engine is not None:
            has_ended = await asyncio.to_thread(self.engine.stop)
        else:
            self.close_kv()
        await http.stop()
        if self.gatekeeper is not None:
            await asyncio.to_thread(self.gatekeeper.stop)
        if has_ended:  # else the engine's thread holds sockets, and `destroy` would wait for them
            self.context.destroy(linger=LAST_WORDS_MS)

    def _abandon_loading(self, serving: asyncio.Task[None]) -> NoReturn:
        """End at once: nothing can interrupt the thread that loads weights, and nothing else has begun."""
        log.info("stopping while the model is loaded")
        end_process(1 if serving.done() else 0)

    def _tend_pod(self) -> asyncio.Task[None] | None:
        if not self.config.pod_deletion_cost:
            return None
        # Imported here: other workers need no HTTP client.
        from common.worker.pod_deletion_cost import keep_pod_deletion_cost

        return keep_pod_deletion_cost(self.config, self._status)

    async def _start_engine(self, control: ControlServer) -> None:
        began = time.monotonic()
        files, loaded = await asyncio.to_thread(self._load)
        if self.config.kv_transport == "shm" and loaded.kv.shared is None:
            raise ConfigError("kv_transport", "shm", "auto or tcp: this system has no memory to share")
        # Before the engine: a large vocabulary stops every thread for a second, while no router waits for this worker.
        grammars = await asyncio.to_thread(_grammars, files, loaded)
        engine = self.build_engine(files, loaded, grammars, control.send_threadsafe)
        floor_s = FLOOR_S if self.config.device == "cpu" else DEVICE_FLOOR_S
        engine.step_times = StepTimes(fixed_s=self.config.stall_timeout_s, floor_s=floor_s, token_s=loaded.token_s)
        self.metrics.describe_cache(self.config.block_size, loaded.kv.num_blocks, loaded.kv_dtype)
        self.loaded = loaded
        if self.config.core_share and self.config.device == "cpu":
            cores = CoreShare(self.config.core_share, loaded.num_threads)
            loaded.share_cores(cores)
            engine.share_cores(cores, loaded.set_num_threads)
        engine.start()
        self.engine = engine
        control.broadcast_hello()
        log.info(
            "ready: %s in %s, %d KV blocks of %d tokens (%.2f GiB), %d threads, loaded in %.1f s",
            files.model_id,
            loaded.precision,
            loaded.kv.num_blocks,
            self.config.block_size,
            loaded.kv.num_blocks * loaded.kv.block_bytes / 2**30,
            loaded.num_threads,
            time.monotonic() - began,
        )

    def _load(self) -> tuple[ModelFiles, LoadedModel]:
        # Imported here: torch takes a second, and the sockets should answer before that.
        from common.runner.loaded import LoadedModel

        files = resolve_model(self.config.model, progress=False)
        return files, LoadedModel.load(files, self.config)

    async def _watch_engine(self) -> None:
        """Raise the reason when the engine's thread ends, or the gatekeeper's."""
        while self.engine is None or self.engine.alive:
            if self.gatekeeper is not None and self.gatekeeper.failure is not None:
                raise RuntimeError("the gatekeeper died") from self.gatekeeper.failure
            await asyncio.sleep(0.1)
        raise RuntimeError("the engine died") from self.engine.failure

    async def _drain(self, control: ControlServer, serving: asyncio.Task[None]) -> None:
        """Take nothing new, let what runs finish or be handed over, up to the deadline."""
        self._draining = True
        control.broadcast_heartbeat()
        deadline = time.monotonic() + self.config.drain_timeout_s
        while time.monotonic() < deadline and self.engine is not None and self.engine.alive and not serving.done():
            if self.engine.is_empty:
                break
            await asyncio.sleep(DRAIN_POLL_S)
        log.info("stopping: %s", "all requests finished" if self.engine and self.engine.is_empty else "drain time over")

    def _on_signal(self, stop: asyncio.Event) -> None:
        if stop.is_set():
            log.warning("second signal: exiting at once")
            os._exit(1)
        stop.set()

    def _on_message(self, router: bytes, message: AnyMessage) -> None:
        if self._draining and self.control is not None and isinstance(message, PrefillRequest | DecodeRequest):
            self.control.send(router, self._refusal(message))  # its router sent it before it heard of the drain
        elif self.engine is not None and not self.engine.submit(RequestReceived(router, message)):
            log.error("the engine's inbox is full: dropped %s", type(message).__name__)

    def _refusal(self, message: PrefillRequest | DecodeRequest) -> RequestFailed:
        return RequestFailed(
            worker_id=self.identity.worker_id,
            request_id=message.request_id,
            attempt=message.attempt,
            phase="queue",
            message="the worker drains",
            retryable=True,
        )

    def _on_router_lost(self, router: bytes) -> None:
        if self.engine is not None:
            self.engine.notify(RouterLost(router))

    def _heartbeat(self, router: bytes) -> WorkerHeartbeat:
        sequence = self.block_log.sequence
        return heartbeat_of(self.identity, self.engine, self._status(), router, sequence, draining=self._draining)

    def _status(self) -> EngineStatus:
        status = self.engine.status if self.engine is not None else EngineStatus()
        return replace(
            status,
            num_dropped_frames=status.num_dropped_frames + (self.control.num_dropped_frames if self.control else 0),
            num_refused_connections=self.gatekeeper.num_refused if self.gatekeeper else 0,
        )

    def _advertised(self, address: str) -> str:
        """The address that others reach this worker by."""
        host = self.config.advertise_host
        if not address or not host:
            return address
        return f"tcp://{in_url(host)}:{address.rsplit(':', 1)[1]}"

    def _write_address_file(self, address: str, http_port: int) -> None:
        if self.config.address_file:
            host = self.config.advertise_host or self.config.host
            body = {
                "worker_id": self.identity.worker_id,
                "role": self.role,
                "address": address,
                "kv_address": self.kv_address,
                "http": f"http://{in_url(host)}:{http_port}",
            }
            path = Path(self.config.address_file)
            temporary = path.with_name(f"{path.name}.{os.getpid()}")
            temporary.write_text(json.dumps(body))
            temporary.replace(path)


def _grammars(files: ModelFiles, loaded: LoadedModel) -> Grammars:
    from common.grammar.grammars import Grammars  # which imports torch, as the model has by now

    grammars = Grammars(files, loaded.vocab_size)
    grammars.start()
    return grammars


def run_worker(process: Callable[[], WorkerProcess]) -> int:
    """Run a worker to its end and return the exit status; a refusal to start is one line on stderr."""
    import uvloop

    # The KV thread must get the interpreter quickly when a frame arrives while the engine computes.
    sys.setswitchinterval(0.0005)
    keep_large_buffers()
    raise_file_limit()

    async def main() -> None:
        await process().run()

    try:
        uvloop.run(main())
    except ModelError as error:
        log.error("cannot start: %s", error)
        return 2
    except (DiptychError, zmq.ZMQError, OSError) as error:
        log.error("cannot start or go on: %s", error)
        return 1
    except RuntimeError as error:
        log.error("%s: %s", error, error.__cause__)
        return 1
    return 0


def end_process(status: int) -> NoReturn:
    """End at once: to take the interpreter and torch apart needs a second or two, which a replacement would wait."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
