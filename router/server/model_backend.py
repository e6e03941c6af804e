"""Components of one served model: its workers, tokenizer, metrics and planner."""

from __future__ import annotations

from collections.abc import Collection

from common.config import RouterConfig
from common.model_files import ModelFiles, served_task
from router.dispatch import Dispatcher
from router.generation import ServedModel, ServingClient
from router.models import with_chat_template
from router.observe import ENGINE, MeasuredClient, PlanCollector, PoolCollector, RouterMetrics, SLOWindow
from router.planner import Budget, LoadWindow, PlanLoop, SizingForecaster, scaler_of
from router.text import TextPipeline, TextThreads


class ModelBackend:
    """Owned by the router's event loop: `start`, serve, `close`. `served` is the model as seen by the endpoints."""

    def __init__(
        self,
        config: RouterConfig,
        files: ModelFiles,
        threads: TextThreads,
        *,
        front: RouterMetrics | None = None,
        models: Collection[str] = (),
        budget: Budget | None = None,
        has_prefill: bool = True,
    ) -> None:
        """`config` names only this model.

        In a router of several models, `front` are the router's metrics, `models` are the model ids whose workers the
        census assigns to this model, and `budget` is shared by the planners. `has_prefill`: see `Dispatcher`. Raises
        ModelError; raises ConfigError if a configured file cannot be used, or if no workers of the role that the
        model's task needs are configured.
        """
        needed = served_task(files, config.task).needed
        config.check_workers(needed)
        files = with_chat_template(files, config)
        self.config, self.files = config, files
        self.name = config.served_model_name or files.model_id
        self.text = TextPipeline.from_files(files, threads=threads)
        starts_compiler = not config.on_demand_folder  # else the first grammar does: most models never get one
        if starts_compiler and self.text.grammars is not None and files.eos_token_ids:
            self.text.grammars.start()
        splits = SizingForecaster.of(config)
        self.dispatcher = Dispatcher(config, splits=splits, needed=needed, models=models, has_prefill=has_prefill)
        self.metrics = RouterMetrics(self.name, self.dispatcher.load, front=front, classes=config.classes)
        window = SLOWindow.of(config.classes)
        labels = {"model_name": self.name, "engine": ENGINE}
        self.metrics.registry.register(PoolCollector(self.dispatcher, window, labels))
        load = LoadWindow(config.slo_quantile)
        self._plans = config.planner != "off"
        measures = window.has_goals or self._plans
        client: ServingClient = self.dispatcher
        if measures:
            client = MeasuredClient(self.dispatcher, window, load=load)
        self.planning = PlanLoop(
            config,
            load,
            lambda: self.dispatcher.fleet.registry.workers.values(),
            lambda: self.dispatcher.demand(window.tpot_s).held,
            scaler_of(config),
            budget=budget,
            model=self.name,
            has_prefill=self.dispatcher.core.has_prefill,
            is_listed=lambda: self.dispatcher.fleet.is_listed(),
        )
        self.metrics.registry.register(PlanCollector(lambda: self.planning.outlook, labels))
        self.served = ServedModel(
            client,
            self.text,
            files,
            config,
            self.metrics,
            adapters=self.dispatcher.adapters,
            serving=self.dispatcher.serving,
            outlook=lambda: self.planning.outlook,
        )

    @property
    def failure(self) -> str:
        """Why the process must be restarted; "" while it is healthy."""
        return self.dispatcher.fleet.failure or self.planning.failure

    async def start(self) -> None:
        """Start connecting to the workers, without waiting for connections."""
        await self.dispatcher.start()
        if self._plans:
            self.planning.start()

    async def close(self) -> None:
        """Stop the planner, all requests and all sockets."""
        await self.planning.close()
        await self.dispatcher.close()
        self.text.close()
