"""`python -m router`: the HTTP front door."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from common.config import RouterConfig
from common.config.sources import exit_refused, load
from common.errors import ConfigError, ModelError
from common.observe.logging import setup_logging

if TYPE_CHECKING:  # imported late, see `main`
    from common.model_files.files import ModelFiles
    from common.wire.message_fields import Role
    from router.policy.routing import RoutingPolicy

PROG = "diptych router"
log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM; 0 after a clean end, 1 when the port is taken, 2 when a setting or the model is refused."""
    config = load(RouterConfig, argv, prog=PROG)
    setup_logging("router", config.log_level, json=config.log_json)
    # Imported after the command line is parsed, so that --help and refusals are instant.
    import uvloop

    from router.server.server import listen

    try:
        listener = listen(config.host, config.port)
    except OSError as error:
        print(f"{PROG}: cannot listen on {config.host}:{config.port}: {error.strerror or error}", file=sys.stderr)
        return 1
    try:
        uvloop.run(run(config, listener))
    except (ConfigError, ModelError) as error:
        exit_refused(error, PROG)
    return 0


async def run(config: RouterConfig, listener: socket.socket, policy: RoutingPolicy | None = None) -> None:
    """Build the router and serve until a signal; without a `policy`, the usual one routes.

    Raises ModelError, and ConfigError for a file that a setting names.
    """
    from router.dispatch.dispatcher import Dispatcher
    from router.garbage import collect_seldom
    from router.generation.choices.tracing import Tracing
    from router.observe.measured_client import MeasuredClient
    from router.observe.metrics import ENGINE, RouterMetrics
    from router.observe.plan_metrics import PlanCollector
    from router.observe.pool_metrics import PoolCollector
    from router.observe.slo import SLOWindow
    from router.planner.load.window import LoadWindow
    from router.planner.loop import PlanLoop, scaler_of
    from router.planner.sizing_forecaster import SizingForecaster
    from router.server.app import build_app
    from router.server.server import serve, stop_on_signals
    from router.text.text_pipeline import TextPipeline

    stop = stop_on_signals()
    files, needed = _model(config)
    text = TextPipeline.from_files(files, threads=config.tokenizer_threads)
    if text.grammars is not None and files.eos_token_ids:
        text.grammars.start()
    dispatcher = Dispatcher(config, policy=policy, splits=SizingForecaster.of(config), needed=needed)
    name = config.served_model_name or files.model_id
    metrics = RouterMetrics(name, dispatcher.load)
    window = SLOWindow.of(config.classes)
    metrics.registry.register(PoolCollector(dispatcher, window, {"model_name": name, "engine": ENGINE}))
    load = LoadWindow(config.slo_quantile)
    plans = config.planner != "off"
    client = MeasuredClient(dispatcher, window, load=load) if window.has_goals or plans else dispatcher
    planning = PlanLoop(
        config,
        load,
        lambda: dispatcher.fleet.registry.workers.values(),
        lambda: dispatcher.demand(window.tpot_s).held,
        scaler_of(config),
        has_prefill=bool(config.prefill or config.prefill_services or config.discovery_file),
    )
    metrics.registry.register(PlanCollector(lambda: planning.outlook, {"model_name": name, "engine": ENGINE}))
    tracing = Tracing.of(config)
    app = build_app(client, text, files, config, metrics, lambda: dispatcher.fleet.failure or planning.failure, tracing)
    app.state.service.outlook = lambda: planning.outlook
    collect_seldom()
    try:
        await dispatcher.start()
        if plans:
            planning.start()
        where = dict(zip(("host", "port"), listener.getsockname(), strict=False))
        log.info("listening", extra={**where, "model": files.model_id, "responses": app.state.responses.place})
        await serve(app, listener, dispatcher.close, stop)
    finally:
        await planning.close()
        await dispatcher.close()
        text.close()
        if tracing is not None:
            tracing.close()


def _model(config: RouterConfig) -> tuple[ModelFiles, Role]:
    """The model's files, and the workers that it needs. Raises ModelError, and ConfigError where there are none."""
    from common.model_files.resolve import resolve_model
    from common.model_files.task import served_task

    files = resolve_model(config.model, progress=False, weights=False)
    needed = served_task(files, config.task).needed
    config.check_workers(needed)
    return files, needed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
