"""All that a router serves: one model, or several behind one front door.

one       app ── Service ── ServedModel ── workers
several   app ── front Service ── Models ──┬─ Service ── ServedModel ── workers of a <─┐
                 EveryModel (load, ready)  └─ Service ── ServedModel ── workers of b <─┴─ ModelCensus
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from fastapi import FastAPI

from common.config import RouterConfig
from common.errors import ConfigError
from common.model_files import ModelFiles, resolve_model
from router.fleet import ModelCensus
from router.generation import Models, ServedAdapters, Service, ServingClient, Tracing
from router.models import (
    LORA_FIELD,
    MODELS_FIELD,
    AdaptersSource,
    Catalog,
    ModelsSource,
    check_planned,
    same_model,
    settings_of,
)
from router.observe import ENGINE, DiscoveryCollector, RouterMetrics
from router.planner import Outlook, budget_of
from router.server.adapter_follower import AdapterFollower
from router.server.app import build_app
from router.server.every_model import EveryModel
from router.server.served_model import ServedModel
from router.siblings import RouterPart
from router.text import MAX_PENDING, TextPipeline, TextThreads

TOKENIZER_THREADS = 2
"""With two or more, an additional thread handles texts above 256 KiB."""
NO_MODEL = ""
"""The name of a model in metrics of what belongs to none: connections, keys, requests that were refused unread."""


class Serving:
    """Owned by the router's event loop: `start`, serve `app`, `close`."""

    def __init__(self, config: RouterConfig, part: RouterPart | None = None) -> None:
        """`part`: which process of a router this is, of several.

        Raises ModelError and ConfigError.
        """
        self._source = ModelsSource(config, part)
        table = self._source.table
        self._config, self._table = config, table
        files = [resolve_model(entry.model, progress=False, weights=False) for entry in table.models]
        self.catalog = Catalog(table, [one.model_id for one in files])
        threads = TextThreads(TOKENIZER_THREADS, MAX_PENDING * len(files))
        self.tracing = Tracing.of(config)
        self.census: ModelCensus | None = None
        entries = self.catalog.entries.items()
        configs = settings_of(config, self.catalog.entries)
        check_planned(config, configs)
        if len(files) == 1:
            alone = ServedModel(configs[0], files[0], threads, has_prefill=table.models[0].has_prefill)
            self.models: tuple[ServedModel, ...] = (alone,)
            self.app = app_of_one(self.catalog, self.models[0], lambda: self.failure, self.tracing, part)
        else:
            front, budget = RouterMetrics(NO_MODEL, None), budget_of(config)
            names = [frozenset((own.model_id, entry.model)) for own, (_, entry) in zip(files, entries, strict=True)]
            self.models = tuple(
                ServedModel(
                    one,
                    own,
                    threads,
                    front=front,
                    models=known,
                    budget=budget,
                    has_prefill=entry.has_prefill,
                )
                for one, own, known, entry in zip(configs, files, names, table.models, strict=True)
            )
            self.census = self._census(config, names, front)
            self.app = app_of_several(
                config, self.catalog, self.models, front, lambda: self.failure, self.tracing, part
            )

        service: Service = self.app.state.service
        if (watch := self._source.watch) is not None:
            service.gate.also_watch(MODELS_FIELD, watch, self._read_anew)
        self._adapters: AdapterFollower | None = None
        if config.lora_file and (part is None or part.index == 0):
            self._adapters_source = AdaptersSource(config.lora_file, self.catalog, part)
            orders = {model.name: model.adapters for model in self.models}
            self._adapters = AdapterFollower(orders, self._adapters_source.entries)
            service.gate.also_watch(LORA_FIELD, self._adapters_source.watch, self._read_adapters)

    async def start(self) -> None:
        """Connect to the workers; returns at once."""
        for model in self.models:
            await model.start()
        if self.census is not None:
            await self.census.start()
        if self._adapters is not None:
            self._adapters.start()

    async def close_workers(self) -> None:
        """Fail all requests and close every socket to workers."""
        if self._adapters is not None:
            await self._adapters.close()
        if self.census is not None:
            await self.census.close()
        await asyncio.gather(*(model.dispatcher.close() for model in self.models))

    async def close(self) -> None:
        """End everything."""
        await self.close_workers()
        for model in self.models:
            await model.close()
        if self.tracing is not None:
            self.tracing.close()

    @property
    def failure(self) -> str:
        """Why the process must be restarted; "" while it is sound."""
        found = [model.failure for model in self.models]
        if self.census is not None:
            found.append(self.census.failure)
        if self._adapters is not None:
            found.append(self._adapters.failure)
        return next(filter(None, found), "")

    async def _read_anew(self) -> None:
        """Take what the file says now of the same models. Raises ConfigError."""
        table = await asyncio.to_thread(self._source.read)
        before = [same_model(entry) for entry in self._table.models]
        if before != [same_model(entry) for entry in table.models]:
            allowed = "the same models, names, parsers, goals and prefill, in the same order; a restart takes others"
            raise ConfigError(MODELS_FIELD, self._config.models_file, allowed)
        self.catalog = Catalog(table, [model.files.model_id for model in self.models])
        service: Service = self.app.state.service
        service.models.catalog = self.catalog
        service.gate.models.change({name: entry.limits for name, entry in self.catalog.entries.items()})
        self._source.accept()

    async def _read_adapters(self) -> None:
        """Follow what the file of adapters says now. Raises ConfigError."""
        assert self._adapters is not None
        self._adapters.change(await asyncio.to_thread(self._adapters_source.read, self.catalog))

    def _census(self, config: RouterConfig, names: Sequence[frozenset[str]], metrics: RouterMetrics) -> ModelCensus:
        known = {own: model.name for model, names_of in zip(self.models, names, strict=True) for own in names_of}
        fleets = {model.name: model.dispatcher.fleet for model in self.models}
        census = ModelCensus(config, known, {name: fleet.reconcile for name, fleet in fleets.items()})
        for fleet in fleets.values():
            fleet.on_stranger = census.on_stranger
            fleet.registry.explain = census.explain
        if census.source is not None:
            labels = {"model_name": NO_MODEL, "engine": ENGINE}
            metrics.registry.register(DiscoveryCollector(census.source.status, labels))
        return census


class Member(Protocol):
    """What the front door uses of one model."""

    @property
    def name(self) -> str: ...
    @property
    def client(self) -> ServingClient: ...
    @property
    def text(self) -> TextPipeline: ...
    @property
    def files(self) -> ModelFiles: ...
    @property
    def config(self) -> RouterConfig: ...
    @property
    def metrics(self) -> RouterMetrics: ...
    @property
    def outlook(self) -> Outlook | None: ...
    @property
    def adapters(self) -> ServedAdapters: ...


def app_of_one(
    catalog: Catalog,
    model: Member,
    failure: Callable[[], str],
    tracing: Tracing | None,
    part: RouterPart | None = None,
) -> FastAPI:
    """The application of a router with one model. Raises ConfigError."""
    app = build_app(model.client, model.text, model.files, model.config, model.metrics, failure, tracing, part)
    service: Service = app.state.service
    service.outlook, service.adapters = lambda: model.outlook, model.adapters
    service.models = Models(catalog, {model.name: service})
    service.gate.models.change({name: entry.limits for name, entry in catalog.entries.items()})
    return app


def app_of_several(
    config: RouterConfig,
    catalog: Catalog,
    models: Sequence[Member],
    metrics: RouterMetrics,
    failure: Callable[[], str] = str,
    tracing: Tracing | None = None,
    part: RouterPart | None = None,
) -> FastAPI:
    """The application of a router with several models, whose `metrics` show those of all. Raises ConfigError."""
    first, clients = models[0], {model.name: model.client for model in models}
    every = EveryModel(clients, {model.name: model.files.max_model_len for model in models})
    metrics.show_models([model.metrics for model in models])
    app = build_app(every, first.text, first.files, config, metrics, failure, tracing, part)
    front: Service = app.state.service
    services = {model.name: _behind(front, model) for model in models}
    front.models = Models(catalog, services)
    front.gate.models.change({name: entry.limits for name, entry in catalog.entries.items()})
    for service in services.values():
        service.models = front.models
    return app


def _behind(front: Service, model: Member) -> Service:
    """The service of one model behind the front."""
    service = Service(
        model.client,
        model.text,
        model.files,
        model.config,
        model.metrics,
        front.gate,
        tracing=front.tracing,
        front=front,
    )
    service.outlook, service.adapters = lambda: model.outlook, model.adapters
    return service
