"""`python -m router`: the HTTP front door."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from common.config import RouterConfig, exit_refused, load
from common.errors import ConfigError, ModelError
from common.observe import setup_logging

if TYPE_CHECKING:  # imported late, see `main`
    from router.siblings.part import RouterPart

PROG = "diptych router"
log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM; 0 after a clean end, 1 when the port is taken, 2 when a setting or the model is refused."""
    config = load(RouterConfig, argv, prog=PROG)
    # Imported after the command line is parsed, so that --help and refusals are instant.
    from router.access import check_access_files
    from router.policy import load_policy

    try:  # before the model is fetched, and before other processes start
        check_access_files(config)
        load_policy(config.routing_policy, config.local_prefill_threshold)
    except ConfigError as error:
        exit_refused(error, PROG)
    setup_logging("router", config.log_level, json=config.log_json)
    if config.router_processes > 1:
        from router.cli.serve.router_processes import run_together

        return run_together(config, PROG)
    import uvloop

    from common.wire import listening
    from router.server.server import listen

    try:
        listener = listening.inherited() or listen(config.host, config.port)
    except OSError as error:
        print(f"{PROG}: cannot listen on {config.host}:{config.port}: {error.strerror or error}", file=sys.stderr)
        return 1
    try:
        uvloop.run(run(config, listener))
    except (ConfigError, ModelError) as error:
        exit_refused(error, PROG)
    return 0


async def run(config: RouterConfig, listener: socket.socket, part: RouterPart | None = None) -> None:
    """Build the router and serve until a signal, as `part` of several processes or alone.

    Raises ModelError, and ConfigError for a file that a setting names.
    """
    from router.garbage import collect_seldom
    from router.server.server import serve, stop_on_signals
    from router.server.serving import Serving

    stop = stop_on_signals()
    serving = Serving(config, part)
    collect_seldom()
    try:
        await serving.start()
        where = dict(zip(("host", "port"), listener.getsockname(), strict=False))
        models = "on demand" if config.on_demand_folder else ", ".join(one.files.model_id for one in serving.models)
        log.info("listening", extra={**where, "model": models, "responses": serving.app.state.responses.place})
        await serve(serving.app, listener, serving.close_workers, stop)
    finally:
        await serving.close()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
