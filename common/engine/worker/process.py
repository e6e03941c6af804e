"""Lifecycle of a worker process of either role:

bind sockets ─> write --address-file ─> load the model (not ready) ─> run the engine (ready) ─> SIGTERM: drain ─> exit 0

While it is ready, a router may change its role (`duties.py`).
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import zmq
import zmq.asyncio

from common.config import WorkerConfig, with_flag
from common.engine.worker.adapters import WorkerAdapters
from common.engine.worker.contract import DutyOffer, EngineStatus, RequestReceived, RouterLost, ServedModel
from common.engine.worker.control import ControlServer, bind_control
from common.engine.worker.duties import DRAIN_POLL_S, Duties
from common.engine.worker.metrics import AdapterCollector, WorkerMetrics
from common.engine.worker.probes import WorkerHTTP
from common.engine.worker.serving import WorkerServing
from common.engine.worker.vitals import WorkerIdentity, heartbeat_of, hello_of, probe_of
from common.errors import ConfigError, DiptychError, ModelError
from common.machine import NO_ROOM, keep_large_buffers, raise_file_limit, remove_private_folders, write_failure
from common.model_files import ModelFiles, hold_model, release_models, resolve_model
from common.wire import Curve, Gatekeeper, allow_many_sockets, in_url, warn_if_readable
from common.wire.messages import (
    AnyMessage,
    ChangeRole,
    DecodeRequest,
    PrefillRequest,
    RequestFailed,
    ResetPrefixCache,
    SetAdapter,
    SetServing,
    WeightsPart,
    WorkerHeartbeat,
    WorkerHello,
)

log = logging.getLogger(__name__)
CANNOT_BIND = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES)
ADDRESS_RETRY_S = 2.0
"""Interval, in seconds, between attempts to write the address file while the disk is full."""
LAST_WORDS_MS = 500
"""Time, in milliseconds, to send the last messages to routers at exit."""


class WorkerProcess:
    """Runs one engine and one control socket. `home`: its first role; `other`: role to which a router may change it."""

    def __init__(self, home: DutyOffer[Any], other: DutyOffer[Any] | None = None) -> None:
        self.config = config = home.config
        self._load_model, self._abandon_load = home.load, home.abandon
        identity = WorkerIdentity.create(home.role, config.worker_id)
        self.context = zmq.asyncio.Context(io_threads=config.io_threads)
        allow_many_sockets(self.context)
        self.blocking_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self.context)
        goals_ms = (getattr(offer.config, "slo_tpot_ms", 0.0) for offer in (home, other) if offer is not None)
        self.metrics = WorkerMetrics(
            config.model, identity.worker_id, self._status, role=home.role, slo_tpot_s=max(goals_ms) / 1e3
        )
        self.curve = Curve.load(config.curve_key, config.curve_authorized)
        self.gatekeeper: Gatekeeper | None = None
        self.control: ControlServer | None = None
        self.adapters = WorkerAdapters(self._notify_routers)
        self.metrics.register(lambda labels: AdapterCollector(self.adapters, self._status, labels, config.lora_places))
        self.duties = Duties(home, other, self.blocking_context, self.curve, self.metrics, identity)
        self.serving = WorkerServing(self.duties, self._load_model, self._notify_routers, self._resolve, self._release)
        self._held: dict[str, Path] = {}

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT. Raises the error that stopped the engine."""
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
            if self.serving.is_waking:
                self._abandon_loading(serving)
            await self.serving.close()
            await self.duties.settle()
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
        """Bind all sockets and publish their addresses. Does not run the control server yet."""
        config = self.config
        if self.curve is not None:
            warn_if_readable(config.curve_key)
            self.gatekeeper = Gatekeeper(self.blocking_context, self.curve)
            self.gatekeeper.start()
        with _refusing(config, "port"):
            control_socket, address = bind_control(self.context, config.host, config.port, self.curve)
        with _refusing(config, "kv_port", "lend_port"):
            self.duties.bind()
        http = WorkerHTTP(
            config.host,
            config.http_port,
            lambda: probe_of(
                self.duties.identity,
                self.duties.engine,
                draining=self.duties.is_draining,
                condition=self.serving.condition,
            ),
            self.metrics.registry,
        )
        with _refusing(config, "http_port"):
            http_port = await http.start()
        self._write_address_file(self._advertised(address), http_port)
        self.control = ControlServer(
            control_socket,
            self._hello,
            self._heartbeat,
            self._on_message,
            self._on_router_lost,
            heartbeat_s=config.heartbeat_s,
            router_timeout_s=config.router_timeout_s,
            blocks=lambda: self.duties.block_log,
        )
        where = {"kv": self.duties.kv_address, "http": http_port} if self.duties.kv_address else {"http": http_port}
        log.info("listening on %s", address, extra=where)
        return self.control, http

    async def _close(self, http: WorkerHTTP) -> None:
        """Stop the engine and all threads, and close the sockets."""
        await self.adapters.close()
        has_ended = await asyncio.to_thread(self.duties.stop)
        await http.stop()
        if self.gatekeeper is not None:
            await asyncio.to_thread(self.gatekeeper.stop)
        if has_ended:  # otherwise the engine thread still has open sockets, for which `destroy` would wait
            self.context.destroy(linger=LAST_WORDS_MS)

    def _abandon_loading(self, serving: asyncio.Task[None]) -> NoReturn:
        """Exit immediately: the thread that loads weights cannot be interrupted, and no request has been accepted."""
        log.info("stopping while the model is loading")
        self._abandon_load()
        end_process(1 if serving.done() else 0)

    def _tend_pod(self) -> asyncio.Task[None] | None:
        if not self.config.pod_deletion_cost:
            return None
        # Imported late: other workers need no HTTP client.
        from common.engine.worker.pod_deletion_cost import keep_pod_deletion_cost

        return keep_pod_deletion_cost(self.config, self._status)

    async def _start_engine(self, control: ControlServer) -> None:
        began = time.monotonic()
        model = await asyncio.to_thread(self._load)
        self.duties.adopt(model)
        if model.adapters is not None:
            await self.adapters.load_flags(model.adapters, self.config.lora)
        facts = model.facts
        self.metrics.describe_cache(facts.block_size, facts.num_blocks, facts.kv_dtype)
        model.register_metrics(self.metrics)
        self.duties.start(control)
        control.broadcast_hello()
        log.info(
            "ready: %s in %s, %d KV blocks of %d tokens (%.2f GiB), %sloaded in %.1f s",
            facts.model_id,
            facts.precision,
            facts.num_blocks,
            facts.block_size,
            facts.num_blocks * facts.block_bytes / 2**30,
            f"{facts.resources}, " if facts.resources else "",
            time.monotonic() - began,
        )

    def _load(self) -> ServedModel:
        model: ServedModel = self._load_model(self._resolve(self.config.model))
        return model

    def _resolve(self, name: str) -> ModelFiles:
        """Return the files of a model, and record that this process uses them. Raises ModelError."""
        files = resolve_model(name, progress=False, supported=self.config.engine == "diptych")
        hold_model(files.weights)
        self._held[name] = files.weights[0]
        return files

    def _release(self, kept: Collection[str]) -> None:
        """Release the weights of earlier orders. The worker's own model stays in use."""
        self._held = {name: path for name, path in self._held.items() if name in {*kept, self.config.model}}
        release_models(self._held.values())

    async def _watch_engine(self) -> None:
        """Raise the error when the engine, the gatekeeper or a role change fails.

        Returns when a host with other ranks is shutting down.
        """
        while (engine := self.duties.engine) is None or engine.alive:
            self.duties.check()
            self.serving.check()
            if self.gatekeeper is not None and self.gatekeeper.failure is not None:
                raise RuntimeError("the gatekeeper died") from self.gatekeeper.failure
            if self.duties.must_drain:
                log.info("draining: another host with ranks of this worker is shutting down")
                return
            await asyncio.sleep(0.1)
        raise RuntimeError("the engine died") from engine.failure

    async def _drain(self, control: ControlServer, serving: asyncio.Task[None]) -> None:
        """Reject new requests and let running ones finish or be handed over, up to the deadline.

        A stuck engine is not waited for.
        """
        self.duties.is_draining = True
        control.broadcast_heartbeat()
        most_s, engine = self.config.drain_timeout_s, self.duties.engine
        log.info("draining: %d requests finish or move within %g s", engine.status.num_active if engine else 0, most_s)
        deadline = time.monotonic() + most_s
        while time.monotonic() < deadline and engine is not None and engine.alive and not serving.done():
            if engine.is_empty or engine.is_stuck(time.monotonic()):
                break
            await asyncio.sleep(DRAIN_POLL_S)
        if engine is None or engine.is_empty:
            log.info("stopping: all requests finished or moved")
        elif engine.is_stuck(time.monotonic()):
            stuck = "stopping: the engine is stuck, %d requests are computed again on other workers"
            log.warning(stuck, engine.status.num_active)
        else:
            left = "stopping: drain timeout of %g s expired, %d requests are computed again on other workers"
            log.warning(left, most_s, engine.status.num_active)

    def _on_signal(self, stop: asyncio.Event) -> None:
        if stop.is_set():
            log.warning("received a second signal: exiting immediately")
            end_process(1)
        stop.set()

    def _on_message(self, router: bytes, message: AnyMessage) -> None:
        duties, control = self.duties, self.control
        if isinstance(message, ChangeRole):
            if control is not None:
                duties.order(message, control)
        elif isinstance(message, SetAdapter):
            self.adapters.order(message)
        elif isinstance(message, SetServing):
            if control is not None:
                self.serving.order(message, control)
        elif isinstance(message, WeightsPart):
            self.serving.on_part(router, message)
        elif duties.is_draining and control is not None and isinstance(message, PrefillRequest | DecodeRequest):
            # The message was sent before the router was notified of the drain.
            control.send(router, self._refusal(message, "the worker is draining"))
        elif duties.engine is None and control is not None and isinstance(message, PrefillRequest | DecodeRequest):
            control.send(router, self._refusal(message, "the worker is starting"))
        elif duties.engine is None:
            if isinstance(message, ResetPrefixCache):
                duties.pending_reset = RequestReceived(router, message)
        elif not duties.engine.submit(RequestReceived(router, message)):
            log.error("engine inbox is full: dropped %s", type(message).__name__)

    def _refusal(self, message: PrefillRequest | DecodeRequest, why: str) -> RequestFailed:
        return RequestFailed(
            worker_id=self.duties.identity.worker_id,
            request_id=message.request_id,
            attempt=message.attempt,
            phase="queue",
            message=why,
            retryable=True,
        )

    def _on_router_lost(self, router: bytes) -> None:
        if self.duties.engine is not None:
            self.duties.engine.notify(RouterLost(router))

    def _hello(self) -> WorkerHello:
        duties = self.duties
        where = self._advertised(duties.kv_address), self._advertised(duties.lend_address)
        return hello_of(
            duties.identity,
            duties.config,
            duties.facts,
            *where,
            changes_role=duties.may_change,
            weight_version=self.serving.weight_version,
        )

    def _heartbeat(self, router: bytes) -> WorkerHeartbeat:
        duties, status = self.duties, self._status()
        planner = self.control.planner if self.control is not None else ""
        return heartbeat_of(
            duties.identity,
            duties.engine,
            status,
            router,
            duties.block_log.sequence,
            draining=duties.is_draining,
            planner=planner,
            adapters=self.adapters.states,
            serving=self.serving.state,
        )

    def _notify_routers(self) -> None:
        if self.control is not None:
            self.control.broadcast_heartbeat()

    def _status(self) -> EngineStatus:
        engine = self.duties.engine
        status = engine.status if engine is not None else EngineStatus()
        return replace(
            status,
            num_dropped_frames=status.num_dropped_frames + (self.control.num_dropped_frames if self.control else 0),
            num_refused_connections=self.gatekeeper.num_refused if self.gatekeeper else 0,
        )

    def _advertised(self, address: str) -> str:
        """Return the address at which others reach this worker. Several addresses are those of ranks, sent as is."""
        host = self.config.advertise_host
        if not address or not host or "," in address:
            return address
        return f"tcp://{in_url(host)}:{address.rsplit(':', 1)[1]}"

    def _write_address_file(self, address: str, http_port: int, *, again: bool = False) -> None:
        """Write the address file. Retries later if the disk is full."""
        if not self.config.address_file:
            return
        host = self.config.advertise_host or self.config.host
        body = {
            "worker_id": self.duties.identity.worker_id,
            "role": self.duties.identity.home,
            "address": address,
            "kv_address": self._advertised(self.duties.kv_address),
            "lend_address": self._advertised(self.duties.lend_address),
            "http": f"http://{in_url(host)}:{http_port}",
        }
        try:
            _write_whole(Path(self.config.address_file), json.dumps(body))
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            if not again:
                why = write_failure(self.config.address_file, error, len(json.dumps(body)))
                log.error("--address-file: %s; retrying every %g s", why, ADDRESS_RETRY_S)
            retry = partial(self._write_address_file, address, http_port, again=True)
            asyncio.get_running_loop().call_later(ADDRESS_RETRY_S, retry)


def _write_whole(path: Path, text: str) -> None:
    """Write a file atomically, because other processes may be reading it. Raises OSError."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(path)


@contextmanager
def _refusing(config: WorkerConfig, *names: str) -> Iterator[None]:
    """Turn a failure to bind one of these ports into a ConfigError that names it, or the host."""
    try:
        yield
    except (zmq.ZMQError, OSError) as error:
        if error.errno not in CANNOT_BIND:
            raise
        reason = os.strerror(error.errno).lower()
        ports = names if error.errno != errno.EADDRNOTAVAIL else ()  # ports do not determine whether the host exists
        given = {name: port for name in ports if (port := getattr(config, name, 0))}
        name = next((name for name, port in given.items() if f":{port}'" in str(error)), next(iter(given), "host"))
        allowed = f"a port that is free on {config.host}" if name in given else "an address of this machine"
        raise ConfigError(name, getattr(config, name), f"{allowed} ({reason})") from error


def run_worker(process: Callable[[], WorkerProcess]) -> int:
    """Run a worker and return its exit status. A refusal to start is logged in one line."""
    import uvloop

    # The KV thread must get the GIL quickly when a frame arrives while the engine computes.
    sys.setswitchinterval(0.0005)
    keep_large_buffers()
    raise_file_limit()

    async def main() -> None:
        await process().run()

    try:
        uvloop.run(main())
    except (ConfigError, ModelError) as error:
        log.error("cannot start: %s", with_flag(error) if isinstance(error, ConfigError) else error)
        return 2
    except (DiptychError, zmq.ZMQError, OSError) as error:
        log.error("stopped by an error: %s", error)
        return 1
    except RuntimeError as error:
        log.error("%s: %s", error, error.__cause__)
        return 1
    return 0


def end_process(status: int) -> NoReturn:
    """Exit immediately: tearing down the interpreter and torch takes seconds, which would delay a replacement."""
    for flush in (logging.shutdown, sys.stdout.flush, sys.stderr.flush):
        with suppress(OSError):  # log or output file is on a full disk
            flush()
    remove_private_folders()
    os._exit(status)
