"""`diptych serve`: a complete service on one machine, with the same processes and protocol as a cluster.

    serve ──> download the model ──> prefill-0.. and decode-0.. ──addresses──> router ──/ready──> summary

Workers bind free ports and write them to files in a private temporary folder, so that several services can run on one
machine. Ctrl-C or SIGTERM stops all processes within five seconds. If this process is killed, its children die too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.config import RouterConfig, check_installed, exit_refused
from common.errors import ConfigError, ModelError, listed
from common.machine import PrivateFolder
from common.model_files import GENERATES, ModelFiles, ServedTask, Task, hold_model, resolve_model, served_task
from common.observe import in_bytes, setup_logging
from router.access import check_access_files
from router.cli.serve.keeper import StartFailed
from router.cli.serve.probe import claim_port, reachable_host
from router.cli.serve.processes import ServePlan, read_plan
from router.cli.serve.supervisor import Supervisor
from router.models import AdaptersSource, Catalog, LocalTable, check_planned, read_template, settings_of, table_of
from router.policy import load_policy
from router.request import CHAT_PATH, EMBEDDINGS_PATH, SCORE_PATH
from router.stored import check_stores

log = logging.getLogger(__name__)
QUESTION = "What is a diptych?"
MAX_SHOWN_NAMES = 8
EXAMPLES: Mapping[Task, tuple[str, dict[str, object]]] = {
    "generate": (CHAT_PATH, {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64}),
    "embed": (EMBEDDINGS_PATH, {"input": QUESTION}),
    "score": (SCORE_PATH, {"text_1": QUESTION, "text_2": "A painting on two hinged panels."}),
}
"""Example request by task."""


def pools_for(plan: ServePlan, tasks: Sequence[ServedTask]) -> ServePlan:
    """Return the plan without decode workers for models that do not generate text. `tasks` are those of the models.

    Raises ConfigError for settings that need decode workers.
    """
    pooled = {model for model, task in zip(plan.models, tasks, strict=True) if not task.generates}
    for task in (task for task in tasks if not task.generates):
        if not plan.prefill:
            raise ConfigError("prefill", 0, f"at least 1 with --task {task.name}")
        if plan.autoscale:
            raise ConfigError("autoscale", True, f"omitted with --task {task.name}")
    return dataclasses.replace(plan, decode=tuple(one for one in plan.decode if one.model not in pooled))


def check_settings(config: RouterConfig) -> None:
    """Check what the router's settings name, before the download of a model. Raises ConfigError.

    The router does this too, but starts after the workers, which may load for minutes.
    """
    load_policy(config.routing_policy, config.local_prefill_threshold)
    check_access_files(config)
    check_stores(config)
    for template in {entry.chat_template or config.chat_template for entry in table_of(config).models} - {""}:
        read_template(template)
    if config.otlp_traces_endpoint:
        from router.generation import Tracing  # loads the library of an extra

        tracing = Tracing.of(config)
        assert tracing is not None
        tracing.close()


def model_files(model: str, engine: str) -> ModelFiles:
    """Download and hold a model that workers with `engine` can load. Raises ModelError."""
    files = resolve_model(model, progress=sys.stderr.isatty(), supported=engine == "diptych")
    if engine == "vllm" and files.format == "gguf":
        raise ModelError(f"vLLM does not read GGUF files, such as those of {model}: use a folder or a Hugging Face ID")
    hold_model(files.weights)
    return files


def named_models(plan: ServePlan) -> tuple[ServePlan, tuple[str, ...], ServedTask]:
    """Download and check the models of a plan. Returns the plan, their API names, and the task of the first.

    Raises ConfigError and ModelError.
    """
    files = [model_files(model, plan.engine) for model in plan.models]
    catalog = Catalog(table_of(plan.router), [one.model_id for one in files])
    check_catalog(plan.router, catalog)
    tasks = [served_task(one, plan.router.task) for one in files]
    return pools_for(plan, tasks), catalog.models, tasks[0]


def names_on_demand(plan: ServePlan) -> tuple[str, ...]:
    """Return the API names of the models that can be loaded now. Raises ConfigError and ModelError."""
    assert plan.on_demand is not None
    return tuple(entry.name for entry in LocalTable(plan.router, plan.on_demand.models_dir).read().models)


def check_catalog(config: RouterConfig, catalog: Catalog) -> None:
    """Check the router's settings that name models. Raises ConfigError."""
    check_planned(config, settings_of(config, catalog.entries))
    if config.lora_file:
        AdaptersSource(config.lora_file, catalog)


def summary(plan: ServePlan, names: Sequence[str], took_s: float, task: ServedTask = GENERATES) -> str:
    """Return the text that `diptych serve` prints when the service is ready."""
    host = reachable_host(plan.router.host)
    scheme = "https" if plan.router.tls_cert else "http"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{plan.router.port}"
    path, fields = EXAMPLES[task.name]
    request = {"model": next(iter(names), "NAME"), **fields}
    wants_key = plan.router.api_key or plan.router.api_key_file
    key = '-H "Authorization: Bearer $DIPTYCH_API_KEY" ' if wants_key else ""
    what = f"serves {', '.join(names)}"
    pools = f"{len(plan.prefill)} prefill + {len(plan.decode)} decode + router"
    if plan.on_demand is not None:
        what = f"loads models on demand: {listed(names, MAX_SHOWN_NAMES)}"
        pools = f"{in_bytes(plan.on_demand.budget)} for models"
    chat = f"    chat in the browser   {url}/\n" if task.generates else ""
    return f"""
  Diptych {what}, ready after {took_s:.1f} s: {pools}

{chat}    dashboard             {url}/dashboard
    OpenAI base URL       {url}/v1
    try it                curl {url}{path} {key}-H 'Content-Type: application/json' \\
                            -d '{json.dumps(request)}'
    stop                  Ctrl-C
"""


async def supervise(plan: ServePlan, names: Sequence[str], runtime: Path, task: ServedTask = GENERATES) -> int:
    """Run the service until a signal stops it. Returns the exit status."""
    supervisor = Supervisor(plan, names, runtime)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signum, supervisor.stop)
    try:
        took_s = await supervisor.start()
        if not supervisor.stopping.is_set():
            try:
                print(summary(plan, names, took_s, task), flush=True)
            except OSError as error:  # a full disk, or a closed pipe
                log.warning("supervisor: ready, but cannot write to standard output: %s", error)
            await supervisor.run()
    except StartFailed as error:
        log.error("supervisor: start failed: %s; see the messages above", error)
        return error.status
    finally:
        await supervisor.shutdown()
    log.info("supervisor: stopped")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run `diptych serve`. Returns the exit status."""
    try:
        plan = read_plan(sys.argv[1:] if argv is None else argv)
        port = claim_port(plan.router.host, plan.router.port)
        plan = dataclasses.replace(plan, router=dataclasses.replace(plan.router, port=port))
        setup_logging("serve", plan.router.log_level, plan.router.log_json)
        check_settings(plan.router)
        if plan.engine == "vllm":
            check_installed()
        plan, names, task = named_models(plan) if plan.on_demand is None else (plan, names_on_demand(plan), GENERATES)
    except (ConfigError, ModelError) as error:
        exit_refused(error, "diptych serve")
    except KeyboardInterrupt:
        return 130
    if plan.placement:
        log.info(plan.placement)
    models = "on demand" if plan.on_demand is not None else ", ".join(names)
    log.info("supervisor: starting", extra={"model": models, "prefill": len(plan.prefill), "decode": len(plan.decode)})
    with PrivateFolder("serve") as runtime:
        return asyncio.run(supervise(plan, names, runtime.path, task))


if __name__ == "__main__":
    sys.exit(main())
