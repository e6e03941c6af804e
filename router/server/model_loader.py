"""Loads models on demand: applies the decisions of `Residency` to tokenizers, workers and their connections.

    request ── use ──> Residency ── wanted models ──> diptych serve ── report: addresses, failures ──> fleets
       <── loaded, or the reason ──┘

A model that has been used keeps its tokenizer and metrics when its workers are unloaded, unless its files change or
are deleted.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from common.config import RouterConfig
from common.errors import RETRY_AFTER_S, ConfigError, ModelError, ModelNotFound, Unavailable
from common.machine import OwnedTask
from common.model_files import resolve_model, served_task, summary_of
from common.wire import Role
from router.fleet import Endpoint
from router.generation import LoadState, ServedModel
from router.models import Catalog, LocalTable, ModelEntry, settings_of
from router.observe import RouterMetrics
from router.planner import (
    LOOK_S,
    ModelReport,
    OnDemandFolder,
    Report,
    Residency,
    Stage,
    Wanted,
    WantedModel,
    load_failed,
)
from router.server.model_backend import ModelBackend
from router.text import SHORT_TEXT, TextThreads

log = logging.getLogger(__name__)
Result = TypeVar("Result")

REFRESH_S = 0.2
"""Minimum interval between two searches for models, in seconds."""


class _Backend:
    """An opened model, with the workers that it gets and their memory. `stamp` is that of its files."""

    def __init__(
        self, backend: ModelBackend, roles: dict[Role, int], num_bytes: int, stamp: tuple[tuple[int, int], ...]
    ) -> None:
        self.backend, self.roles, self.num_bytes, self.stamp = backend, roles, num_bytes, stamp
        self.endpoints: tuple[Endpoint, ...] = ()

    @property
    def is_ready(self) -> bool:
        """Whether all workers are ready."""
        registry = self.backend.dispatcher.fleet.registry
        return self.backend.dispatcher.ready[0] and all(
            len(registry.ready(role)) >= num for role, num in self.roles.items()
        )

    async def close(self) -> None:
        """Close everything but the text threads, which all models share."""
        await self.backend.planning.close()
        await self.backend.dispatcher.close()
        if self.backend.text.grammars is not None:
            self.backend.text.grammars.close()

    def connect(self, report: ModelReport | None) -> None:
        """Connect to the reported workers only."""
        endpoints: tuple[Endpoint, ...] = ()
        if report is not None:
            pools: dict[Role, tuple[str, ...]] = {"prefill": report.prefill, "decode": report.decode}
            endpoints = tuple(Endpoint(role, address) for role, addresses in pools.items() for address in addresses)
        if endpoints != self.endpoints:
            self.endpoints = endpoints
            self.backend.dispatcher.fleet.reconcile(endpoints)


class OnDemandModels:
    """Implements `ModelLoader`. Not thread-safe: owned by the router's event loop.

    `catalog` has all models, and `served` those of them that have been opened. `on_catalog` is called with a changed
    catalog.
    """

    def __init__(self, config: RouterConfig, front: RouterMetrics, threads: TextThreads) -> None:
        """`front` are the router's metrics. Raises ConfigError, and ModelError if the models cannot be listed."""
        self._config, self._front, self._threads = config, front, threads
        self._exchange = OnDemandFolder(Path(config.on_demand_folder))
        try:
            self._settings = self._exchange.settings()
        except (OSError, msgspec.MsgspecError) as error:
            allowed = f"the folder of a running diptych serve ({error})"
            raise ConfigError("on_demand_folder", config.on_demand_folder, allowed) from error
        self._local = LocalTable(config, self._settings.models_dir)
        self.catalog = _catalog(self._local)
        self.residency = Residency(self._settings.budget, self._settings.keep_s or math.inf)
        self.served: dict[str, ServedModel] = {}
        self.on_catalog: Callable[[Catalog], None] = lambda catalog: None
        self._opened: dict[str, _Backend] = {}
        self._opening: dict[str, asyncio.Task[_Backend]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._wanted: dict[str, WantedModel] = {}
        self._numbers = itertools.count(time.time_ns())  # also above those of a router before
        self._stages: dict[str, Stage] | None = None  # those for which `_wanted` was written
        self._report = Report()
        self._changed = asyncio.Event()  # replaced when it is set
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshed_at, self._is_failing = -math.inf, False
        self._is_closed = False
        self._task = OwnedTask("loading models on demand")

    @property
    def backends(self) -> tuple[ModelBackend, ...]:
        """All opened models."""
        return tuple(one.backend for one in self._opened.values())

    @property
    def failure(self) -> str:
        """Why the process must be restarted; "" while it is healthy."""
        return self._task.failure

    async def start(self) -> None:
        """Adopt the workers of a router before this one, and start to follow the report."""
        names = {entry.model: name for name, entry in self.catalog.entries.items()}
        for one in self._exchange.wanted().models:
            try:
                opened = await self._open(name := names[one.model])
            except (KeyError, Unavailable):
                continue  # a model that has been deleted is unloaded
            self._wanted[name] = one
            self.residency.adopt(name, opened.num_bytes, time.monotonic())
        self._task.start(self._follow())

    async def close(self) -> None:
        """Stop following the report, and fail the requests that wait for a model. Workers keep running."""
        self._is_closed = True
        self._changed.set()
        await self._task.close()
        tasks = [*self._opening.values(), *filter(None, (self._refreshing,))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._closing, return_exceptions=True)

    # ------------------------------------------------------------ for requests

    async def refresh(self) -> None:
        """See `ModelLoader.refresh`. After an error, which is logged, the list does not change."""
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh(), name="find models")
        await asyncio.shield(self._refreshing)

    async def reload(self) -> None:
        """Read the models again. Raises ConfigError for an invalid models file, and ModelError for a missing folder."""
        catalog = await asyncio.to_thread(_catalog, self._local)
        if catalog.entries != self.catalog.entries:
            self.catalog = catalog
            for name in self._deleted():
                self.residency.release(name)
            self._show_opened()
            self.on_catalog(catalog)

    async def open(self, name: str) -> ServedModel:
        """See `ModelLoader.open`."""
        return (await self._open(name)).backend.served

    async def use(self, name: str, keep_s: float | None = None) -> Callable[[], None]:
        """See `ModelLoader.use`."""
        opened = await self._open(name)
        while self._opened.get(name) is not opened:  # it was deleted before this task ran again
            opened = await self._open(name)
        began = time.monotonic()
        self.residency.begin(name, opened.num_bytes, began, keep_s)
        uses = [name]

        def release() -> None:
            if uses:
                self.residency.end(uses.pop(), time.monotonic())
                self._act()

        try:
            self._act()
            async with asyncio.timeout(self._config.request_timeout_s):
                while (stage := self.residency.stage(name)) != "loaded":
                    if self._is_closed:
                        raise Unavailable("The router is shutting down.", retry_after_s=RETRY_AFTER_S)
                    if stage == "idle":
                        raise self._failed(name)
                    await self._changed.wait()
        except TimeoutError:
            release()
            raise Unavailable(
                f"The model {name!r} was not ready within {time.monotonic() - began:.0f} s (--request-timeout-s): "
                f"{self._progress(name)}.",
                param="model",
                retry_after_s=RETRY_AFTER_S,
            ) from None
        except BaseException:
            release()
            raise
        return release

    def unload(self, name: str) -> None:
        """See `ModelLoader.unload`."""
        self.residency.release(name)
        self._act()

    def state(self, name: str) -> LoadState:
        """See `ModelLoader.state`."""
        entry = self.catalog.entries.get(name)
        num_bytes = self._local.num_bytes.get(entry.model, 0) if entry is not None else 0
        model, now = self.residency.models.get(name), time.monotonic()
        if model is None or model.stage in ("idle", "unloading"):
            return LoadState("idle", num_bytes=num_bytes)
        if model.stage == "loaded":
            return LoadState("loaded", max(0.0, model.expires_at - now), num_bytes)
        return LoadState("loading", num_bytes=num_bytes, loading_s=now - model.since)

    async def apart(self, job: Callable[[], Result], size: int = SHORT_TEXT + 1) -> Result:
        """See `ModelLoader.apart`."""
        return await self._threads.run(job, size)

    # ------------------------------------------------------------ inside

    async def _refresh(self) -> None:
        await asyncio.sleep(self._refreshed_at + REFRESH_S - time.monotonic())
        try:
            await self.reload()
        except (ConfigError, ModelError) as error:
            log.warning("models on demand: cannot list the models, will retry: %s", error)
        finally:
            self._refreshed_at, self._refreshing = time.monotonic(), None

    async def _open(self, name: str) -> _Backend:
        """Return an opened model. Concurrent calls open it once. Raises Unavailable."""
        while (opened := self._opened.get(name)) is not None and name not in self._opening:
            if not self._is_idle(name):
                return opened
            stamp = await asyncio.to_thread(self._local.stamp, opened.backend.config.model)
            if self._opened.get(name) is opened and name not in self._opening and self._is_idle(name):
                if stamp == opened.stamp:
                    return opened
                break
        if name not in self._opening:
            self.residency.check(name, time.monotonic())
            task = self._opening[name] = asyncio.create_task(self._build(name), name=f"open {name}")
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved
        return await asyncio.shield(self._opening[name])

    async def _build(self, name: str) -> _Backend:
        try:
            if (entry := self.catalog.entries.get(name)) is None:
                raise ModelNotFound(f"The model {name!r} was deleted.", param="model")
            if (before := self._opened.pop(name, None)) is not None:
                await before.close()
            opened = await asyncio.to_thread(self._create, name, entry)
            await opened.backend.start()
        except (ConfigError, ModelError, OSError) as error:
            self.residency.failed(name, str(error), time.monotonic())
            log.error("model %s: cannot be opened: %s", name, error)
            raise self._failed(name) from error
        finally:
            del self._opening[name]
        opened.backend.dispatcher.fleet.registry.explain = lambda role, now: self._progress(name)
        self._opened[name] = opened
        self._show_opened()
        self._show_metrics()
        return opened

    def _is_idle(self, name: str) -> bool:
        """Whether a model has neither workers nor requests, so that it may be opened again."""
        model = self.residency.models.get(name)
        return model is None or (model.stage == "idle" and not model.num_uses)

    def _show_opened(self) -> None:
        """Update `served`. An opened model that has been deleted finishes its requests, but gets no new ones."""
        self.served.clear()
        self.served.update(
            {name: one.backend.served for name, one in self._opened.items() if name in self.catalog.models}
        )

    def _show_metrics(self) -> None:
        self._front.show_models([one.metrics for one in self.backends])

    def _deleted(self) -> set[str]:
        """Return the known models that are no longer in the catalog."""
        return (self._opened.keys() | self.residency.models.keys()) - self.catalog.entries.keys()

    def _close_deleted(self) -> None:
        """Close deleted models that have neither workers nor requests."""
        for name in self._deleted():
            if not self._is_idle(name) or name in self._wanted or name in self._opening:
                continue
            self.residency.models.pop(name, None)
            if (opened := self._opened.pop(name, None)) is not None:
                log.info("model %s: closed, because it was deleted", name)
                self._show_metrics()
                task = asyncio.create_task(opened.close(), name=f"close {name}")
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    def _create(self, name: str, entry: ModelEntry) -> _Backend:
        """Read the tokenizer of a model. Called in a thread. Raises ModelError and ConfigError."""
        (config,) = settings_of(self._config, {name: entry})
        stamp = self._local.stamp(entry.model)
        files = resolve_model(entry.model, download=False, progress=False, weights=False, supported=False)
        task, names = served_task(files, config.task), {files.model_id, entry.model}
        roles = self._settings.roles(generates=task.generates, has_prefill=entry.has_prefill)
        num_bytes = self._settings.num_bytes(summary_of(files), roles)
        backend = ModelBackend(
            config, files, self._threads, front=self._front, models=names, has_prefill=roles["prefill"] > 0
        )
        return _Backend(backend, roles, num_bytes, stamp)

    async def _follow(self) -> None:
        while True:
            try:
                self._report = self._exchange.report()
                self._apply()
                self._close_deleted()
                self._act()
                self._is_failing = self._stages is None
            except (OSError, msgspec.MsgspecError) as error:  # such as a full disk: the next look retries
                self._complain(error)
            await asyncio.sleep(LOOK_S)

    def _apply(self) -> None:
        """Apply the report to the models."""
        now = time.monotonic()
        reports = {(one.model, one.load): one for one in self._report.models}
        for name, wanted in list(self._wanted.items()):
            opened, report = self._opened[name], reports.get((wanted.model, wanted.load))
            if report is not None and report.failure:
                log.error("model %s: cannot be loaded: %s", name, report.failure)
                self.residency.failed(name, report.failure, now)
                report = None
            opened.connect(report)
            stage = self.residency.stage(name)
            if stage == "unloading" and report is None:
                log.info("model %s: unloaded", name)
                self.residency.gone(name, now)
            elif stage == "loading" and opened.is_ready:
                took_s = now - self.residency.models[name].since
                self.residency.loaded(name, now)
                log.info("model %s: loaded", name, extra={"took_s": took_s})
            if self.residency.stage(name) in ("idle", "waiting"):
                del self._wanted[name]

    def _act(self) -> None:
        """Let the policy decide. After a change, wake waiting requests and write which models must have workers."""
        names = self.residency.step(time.monotonic())
        stages = {name: model.stage for name, model in self.residency.models.items()}
        if stages == self._stages:
            return
        for name in names:
            known, is_ready = self._wanted.get(name), self.residency.stage(name) == "loaded"
            if known is None:
                log.info("model %s: loading", name, extra={"bytes": self._opened[name].num_bytes})
                model = self._opened[name].backend.config.model
                self._wanted[name] = WantedModel(model, next(self._numbers), self._opened[name].roles)
            elif is_ready and not known.is_ready:
                self._wanted[name] = msgspec.structs.replace(known, is_ready=True)
        self._changed.set()
        self._changed = asyncio.Event()
        try:
            self._exchange.write_wanted(Wanted(tuple(self._with_workers())))
            self._stages = stages
        except OSError as error:
            self._stages = None
            self._complain(error)

    def _with_workers(self) -> Iterator[WantedModel]:
        return (one for name, one in self._wanted.items() if self.residency.stage(name) in ("loading", "loaded"))

    def _complain(self, error: Exception) -> None:
        if not self._is_failing:
            log.error("models on demand: cannot exchange files with diptych serve, will retry: %s", error)
        self._is_failing = True

    def _failed(self, name: str) -> Unavailable:
        model = self.residency.models[name]
        return load_failed(name, model.failure, model.retry_at - time.monotonic())

    def _progress(self, name: str) -> str:
        """Describe the state of a model in words."""
        model = self.residency.models.get(name)
        if model is None or model.stage == "idle":
            return "it is not loaded"
        doing = {"waiting": "waiting for the memory of other models", "unloading": "being unloaded"}
        return f"{doing.get(model.stage, model.stage)} for {time.monotonic() - model.since:.0f} s"


def _catalog(local: LocalTable) -> Catalog:
    table = local.read()
    return Catalog(table, [entry.name for entry in table.models])
