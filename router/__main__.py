"""`python -m diptych.router`: the HTTP front door."""

from __future__ import annotations

import gc
import logging
import socket
import sys
from collections.abc import Sequence

from diptych.common.config import exit_refused, load
from diptych.common.errors import ConfigError, ModelError
from diptych.common.logging import setup_logging
from diptych.common.settings import RouterConfig

PROG = "diptych router"
log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM; 0 after a clean end, 1 when the port is taken, 2 when a setting or the model is refused."""
    config = load(RouterConfig, argv, prog=PROG)
    setup_logging("router", config.log_level, json=config.log_json)
    # Imported after the command line is understood: --help and refusals are instant.
    import uvloop

    from diptych.router.api.server import listen

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


async def run(config: RouterConfig, listener: socket.socket) -> None:
    """The router's life inside its event loop. Raises ModelError, ConfigError for a file that a setting names."""
    from diptych.common.model.files import resolve_model
    from diptych.router.api.app import build_app
    from diptych.router.api.server import serve, stop_on_signals
    from diptych.router.dispatch.dispatcher import Dispatcher
    from diptych.router.measured_client import MeasuredClient
    from diptych.router.metrics import ENGINE, RouterMetrics
    from diptych.router.pool_metrics import PoolCollector
    from diptych.router.slo import SLOWindow
    from diptych.router.text.pipeline import TextPipeline
    from diptych.router.tracing import Tracing

    stop = stop_on_signals()
    files = resolve_model(config.model, progress=False, weights=False)
    text = TextPipeline.from_files(files, threads=config.tokenizer_threads)
    dispatcher = Dispatcher(config)
    name = config.served_model_name or files.model_id
    metrics, window = (
        RouterMetrics(name, dispatcher.load),
        SLOWindow(config.slo_ttft_ms / 1e3, config.slo_tpot_ms / 1e3),
    )
    metrics.registry.register(PoolCollector(dispatcher, window, {"model_name": name, "engine": ENGINE}))
    client = MeasuredClient(dispatcher, window) if window.has_goals else dispatcher
    tracing = Tracing.of(config)
    app = build_app(client, text, files, config, metrics, lambda: dispatcher.fleet.failure, tracing)
    gc.collect()
    gc.freeze()  # what is here now stays: later collections need not look at it
    try:
        await dispatcher.start()
        host, port = listener.getsockname()[:2]
        log.info("listening", extra={"host": host, "port": port, "model": files.model_id})
        await serve(app, listener, dispatcher.close, stop)
    finally:
        await dispatcher.close()
        text.close()
        if tracing is not None:
            tracing.close()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
