"""`diptych serve`: a whole service on one machine, over the same processes and the same wire as a cluster.

    serve ──> fetch the model ──> prefill-0.. and decode-0.. ──addresses──> router ──/ready──> "serving at http://..."

Workers take free ports and write them to files in a private temporary folder, so that several services run side by
side. Ctrl-C or SIGTERM ends every process within five seconds; when this process is killed, its children die too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common.config.sources import exit_refused
from common.errors import ConfigError, ModelError
from common.model_files.resolve import resolve_model
from common.observe.logging import setup_logging
from router.local.probe import claim_port, reachable_host
from router.local.processes import ServePlan, read_plan
from router.local.supervisor import StartFailed, Supervisor
from router.models.catalog import Catalog
from router.models.models_file import table_of

log = logging.getLogger(__name__)


def summary(plan: ServePlan, names: Sequence[str], took_s: float) -> str:
    """What `diptych serve` prints once the service answers."""
    host = reachable_host(plan.router.host)
    scheme = "https" if plan.router.tls_cert else "http"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{plan.router.port}"
    request = {"model": names[0], "messages": [{"role": "user", "content": "What is a diptych?"}], "max_tokens": 64}
    wants_key = plan.router.api_key or plan.router.api_key_file
    key = '-H "Authorization: Bearer $DIPTYCH_API_KEY" ' if wants_key else ""
    pools = f"{len(plan.prefill)} prefill + {len(plan.decode)} decode"
    return f"""
  Diptych serves {", ".join(names)}, ready after {took_s:.1f} s: {pools} + router

    chat in the browser   {url}/
    see it work           {url}/dashboard
    OpenAI base URL       {url}/v1
    try it                curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' \\
                            -d '{json.dumps(request)}'
    stop                  Ctrl-C
"""


async def supervise(plan: ServePlan, names: Sequence[str], runtime: Path) -> int:
    """Run the service until a signal stops it. Returns the exit status."""
    supervisor = Supervisor(plan, runtime)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signum, supervisor.stop)
    try:
        took_s = await supervisor.start()
        if not supervisor.stopping.is_set():
            print(summary(plan, names, took_s), flush=True)
            await supervisor.run()
    except StartFailed as error:
        log.error("the service did not start: %s; its own message is above", error)
        return 1
    finally:
        await supervisor.shutdown()
    log.info("stopped")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `diptych serve`."""
    try:
        plan = read_plan(sys.argv[1:] if argv is None else argv)
        port = claim_port(plan.router.host, plan.router.port)
        plan = dataclasses.replace(plan, router=dataclasses.replace(plan.router, port=port))
        setup_logging("serve", plan.router.log_level, plan.router.log_json)
        files = [resolve_model(model, progress=sys.stderr.isatty()) for model in plan.models]
        names = Catalog(table_of(plan.router), [one.model_id for one in files]).models
    except (ConfigError, ModelError) as error:
        exit_refused(error, "diptych serve")
    except KeyboardInterrupt:
        return 130
    models = ", ".join(one.model_id for one in files)
    log.info("starting", extra={"model": models, "prefill": len(plan.prefill), "decode": len(plan.decode)})
    with tempfile.TemporaryDirectory(prefix="diptych-") as runtime:
        return asyncio.run(supervise(plan, names, Path(runtime)))


if __name__ == "__main__":
    sys.exit(main())
