"""Everything that a router serves: one model, or several that share one `RouterState`.

one       app ── RouterState ── Models ─── ServedModel ── ModelBackend ── workers
several   app ── RouterState ── Models ─┬─ ServedModel ── ModelBackend ── workers of a <─┐
                                      └─ ServedModel ── ModelBackend ── workers of b <─┴─ ModelCensus
on demand app ── RouterState ── Models ─── OnDemandModels ─── ServedModel ── ModelBackend ── workers while loaded
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from common.config import RouterConfig
from common.errors import ConfigError
from common.model_files import resolve_model
from router.access import FileWatch
from router.fleet import ModelCensus
from router.generation import Models, RouterState, Tracing
from router.models import (
    LORA_FIELD,
    MODELS_FIELD,
    AdaptersSource,
    Catalog,
    ModelsSource,
    check_planned,
    fixed_part,
    settings_of,
)
from router.observe import ENGINE, DiscoveryCollector, RouterMetrics
from router.planner import budget_of
from router.server.adapter_reconciler import AdapterReconciler
from router.server.app import build_app
from router.server.model_backend import ModelBackend
from router.server.model_loader import OnDemandModels
from router.siblings import RouterPart
from router.text import MAX_PENDING, TextThreads

TOKENIZER_THREADS = 2
"""With two or more, an additional thread handles texts above 256 KiB."""
NO_MODEL = ""
"""Model label of metrics without a model: connections, keys, and requests refused before their body was read."""


class Serving:
    """The models and application of a router. Owned by its event loop: `start`, serve `app`, `close`."""

    def __init__(self, config: RouterConfig, part: RouterPart | None = None) -> None:
        """`part` identifies this process among the several of a router.

        Raises ModelError and ConfigError.
        """
        self.tracing = Tracing.of(config)
        self.census: ModelCensus | None = None
        self.loader: OnDemandModels | None = None
        self._adapters: AdapterReconciler | None = None
        self._backends: tuple[ModelBackend, ...] = ()
        self._config = config
        if config.on_demand_folder:
            self._serve_on_demand(config, part)
        else:
            self._serve_models(config, part)

    def _serve_on_demand(self, config: RouterConfig, part: RouterPart | None) -> None:
        metrics = RouterMetrics(NO_MODEL, None)
        loader = self.loader = OnDemandModels(config, metrics, TextThreads(TOKENIZER_THREADS, MAX_PENDING))
        models = Models(loader.catalog, loader.served, loader)
        self.app = build_app(config, models, metrics, lambda: self.failure, self.tracing, part)
        router_state: RouterState = self.app.state.router_state

        def adopt(catalog: Catalog) -> None:
            models.catalog = catalog
            router_state.access.models.change({name: entry.limits for name, entry in catalog.entries.items()})

        loader.on_catalog = adopt
        adopt(loader.catalog)
        if config.models_file:
            router_state.access.add_watch(MODELS_FIELD, FileWatch([config.models_file]), loader.reload)

    def _serve_models(self, config: RouterConfig, part: RouterPart | None) -> None:
        self._source = ModelsSource(config, part)
        table = self._source.table
        self._table = table
        files = [resolve_model(entry.model, progress=False, weights=False, supported=False) for entry in table.models]
        self.catalog = Catalog(table, [one.model_id for one in files])
        threads = TextThreads(TOKENIZER_THREADS, MAX_PENDING * len(files))
        entries = self.catalog.entries.items()
        configs = settings_of(config, self.catalog.entries)
        check_planned(config, configs)
        if len(files) == 1:
            alone = ModelBackend(configs[0], files[0], threads, has_prefill=table.models[0].has_prefill)
            self._backends = (alone,)
            config, metrics = configs[0], alone.metrics
        else:
            metrics, budget = RouterMetrics(NO_MODEL, None), budget_of(config)
            names = [frozenset((own.model_id, entry.model)) for own, (_, entry) in zip(files, entries, strict=True)]
            self._backends = tuple(
                ModelBackend(
                    one,
                    own,
                    threads,
                    front=metrics,
                    models=known,
                    budget=budget,
                    has_prefill=entry.has_prefill,
                )
                for one, own, known, entry in zip(configs, files, names, table.models, strict=True)
            )
            metrics.show_models([model.metrics for model in self.models])
            self.census = self._census(config, names, metrics)
        models = Models(self.catalog, {model.name: model.served for model in self.models})
        self.app = build_app(config, models, metrics, lambda: self.failure, self.tracing, part)
        router_state: RouterState = self.app.state.router_state
        for model in self.models:
            model.planning.is_leaving = lambda: router_state.draining
        router_state.access.models.change({name: entry.limits for name, entry in self.catalog.entries.items()})
        if (watch := self._source.watch) is not None:
            router_state.access.add_watch(MODELS_FIELD, watch, self._read_anew)
        if config.lora_file and (part is None or part.index == 0):
            self._adapters_source = AdaptersSource(config.lora_file, self.catalog, part)
            orders = {model.name: model.dispatcher.adapters for model in self.models}
            self._adapters = AdapterReconciler(orders, self._adapters_source.entries)
            router_state.access.add_watch(LORA_FIELD, self._adapters_source.watch, self._read_adapters)

    @property
    def models(self) -> tuple[ModelBackend, ...]:
        """The models, or those that have been opened if they are loaded on demand."""
        return self._backends if self.loader is None else self.loader.backends

    async def start(self) -> None:
        """Start connecting to the workers, without waiting for connections."""
        if self.loader is not None:
            await self.loader.start()
        for model in self._backends:
            await model.start()
        if self.census is not None:
            await self.census.start()
        if self._adapters is not None:
            self._adapters.start()

    async def close_workers(self) -> None:
        """Fail all requests and close all sockets to workers."""
        if self._adapters is not None:
            await self._adapters.close()
        if self.loader is not None:
            await self.loader.close()
        if self.census is not None:
            await self.census.close()
        await asyncio.gather(*(model.dispatcher.close() for model in self.models))

    async def close(self) -> None:
        """Close the workers' sockets, all models and tracing."""
        await self.close_workers()
        for model in self.models:
            await model.close()
        if self.tracing is not None:
            self.tracing.close()

    @property
    def failure(self) -> str:
        """Why the process must be restarted; "" while it is healthy."""
        found = [model.failure for model in self.models]
        if self.loader is not None:
            found.append(self.loader.failure)
        if self.census is not None:
            found.append(self.census.failure)
        if self._adapters is not None:
            found.append(self._adapters.failure)
        return next(filter(None, found), "")

    async def _read_anew(self) -> None:
        """Reload the file of models; the models themselves must be unchanged. Raises ConfigError."""
        table = await asyncio.to_thread(self._source.read)
        before = [fixed_part(entry) for entry in self._table.models]
        if before != [fixed_part(entry) for entry in table.models]:
            allowed = "the same models in the same order, with changes only of aliases, fallbacks, hold and limits"
            raise ConfigError(MODELS_FIELD, self._config.models_file, f"{allowed}: restart the router for others")
        self.catalog = Catalog(table, [model.files.model_id for model in self.models])
        router_state: RouterState = self.app.state.router_state
        router_state.models.catalog = self.catalog
        router_state.access.models.change({name: entry.limits for name, entry in self.catalog.entries.items()})
        self._source.accept()

    async def _read_adapters(self) -> None:
        """Reload the adapter file. Raises ConfigError."""
        assert self._adapters is not None
        self._adapters.change(await asyncio.to_thread(self._adapters_source.read, self.catalog))

    def _census(self, config: RouterConfig, names: Sequence[frozenset[str]], metrics: RouterMetrics) -> ModelCensus:
        known = {own: model.name for model, names_of in zip(self.models, names, strict=True) for own in names_of}
        fleets = {model.name: model.dispatcher.fleet for model in self.models}
        census = ModelCensus(config, known, {name: fleet.reconcile for name, fleet in fleets.items()})
        for fleet in fleets.values():
            fleet.on_stranger = census.on_stranger
            fleet.registry.explain, fleet.is_listed = census.explain, census.is_listed
            fleet.num_unassigned = census.num_unassigned
        if census.source is not None:
            labels = {"model_name": NO_MODEL, "engine": ENGINE}
            metrics.registry.register(DiscoveryCollector(census.source.status, labels))
        return census
