"""Runs vLLM's ranks of one host of a worker: `python -m common.engine.vllm.follower CURVE_KEY FD`.

`diptych rank-host` starts it. FD is a connection to the worker, which sends the plan. This process ends with the
connection, and with any of its ranks, which it reports to the worker.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.connection
import os
import socket
import sys
import threading
from collections.abc import Sequence

import msgspec

from common.engine.ranks import Channel
from common.engine.vllm.connection import normalized_address
from common.engine.vllm.core_log import last_error
from common.engine.vllm.environment import RankResources, prepare_variables
from common.engine.vllm.hosts import PLAN_S, FollowerPlan, link_key, prepare_network
from common.engine.vllm.launch import (
    KV_SPACE,
    START_S,
    CoreFiles,
    end_processes,
    engine_config,
    prepare_files,
    process_tree,
    start_problem,
)
from common.engine.vllm.link import ConnectorSettings
from common.errors import DiptychError, ModelError, RankLost
from common.machine import PrivateFolder, remove_private_folders
from common.model_files import resolve_model
from common.observe import setup_logging
from common.wire.listening import ALL, ALL_IPV4

log = logging.getLogger("common.engine.vllm.follower")
END_S = 3.0
"""Time, in seconds, that ranks get to end after the worker is gone."""


def run(plan: FollowerPlan, settings: ConnectorSettings, files: CoreFiles) -> str:
    """Start the ranks and wait until one ends. Returns why it ended. Raises ModelError and errors of vLLM."""
    check_weights(plan.model, plan.weights_hash)
    prepare_variables(RankResources(on_gpu=plan.on_gpu, num_ranks=plan.num_ranks))
    prepare_files(plan.log_level, files)
    os.environ.pop(KV_SPACE, None)
    if plan.kv_space:
        os.environ[KV_SPACE] = plan.kv_space
    config = engine_config(plan.arguments, files, settings.extra_config(), is_headless=True)
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    log.info("vllm: loading the model on host %d of %d", plan.node_rank, config.parallel_config.nnodes - 1)
    executor = MultiprocExecutor(config, monitor_workers=False)
    files.loaded.touch()
    log.info("vllm: %d ranks run", len(executor.workers))
    processes = {each.proc.sentinel: each.proc for each in executor.workers}
    ended = processes[multiprocessing.connection.wait(list(processes))[0]]
    ended.join()
    return last_error(files.errors, 0) or f"a rank has ended (exit status {ended.exitcode})"


def check_weights(model: str, weights_hash: str) -> None:
    """Raise ModelError unless this host has the worker's model at the same path."""
    try:
        found = resolve_model(model, progress=False, supported=False)
    except ModelError as error:
        raise ModelError(f"this host must have the model at the worker's path {model}: {error}") from error
    if found.weights_hash != weights_hash:
        raise ModelError(
            f"the weights at {model} have hash {found.weights_hash}, those of the worker {weights_hash}: "
            "copy the same files to every host"
        )


def follow(plan: FollowerPlan, curve_key: str, own_address: str, files: CoreFiles) -> str:
    """Run the worker's plan until a rank ends. Returns why the ranks cannot run here."""
    try:
        settings = msgspec.structs.replace(
            plan.settings,
            link_key=link_key(curve_key, plan.link_nonce).hex(),
            curve_key=curve_key,
            kv_host=plan.settings.kv_host if plan.settings.kv_host in (ALL, ALL_IPV4) else own_address,
        )
        prepare_network(own_address, plan.leader)
        return run(plan, settings, files)
    except DiptychError as error:
        return str(error)
    except Exception as error:
        return start_problem(error, files)


def _end_with(channel: Channel) -> None:
    """End all processes of this host when the worker is gone."""
    channel.is_cut(None)
    end_processes(process_tree(), END_S)
    remove_private_folders()
    os._exit(0)


def main(argv: Sequence[str]) -> int:
    """Return 0 if the worker is gone before it sends a plan, and 1 if the ranks cannot run here or have ended."""
    curve_key, descriptor = argv
    channel = Channel(socket.socket(fileno=int(descriptor)), "the worker")
    try:
        plan = msgspec.json.decode(channel.receive(START_S), type=FollowerPlan)
    except RankLost:
        return 0
    setup_logging("rank-host", plan.log_level, json=plan.log_json)
    folder = PrivateFolder("vllm")
    files = CoreFiles(folder.path)
    threading.Thread(target=_end_with, args=(channel,), name="watch-worker", daemon=True).start()
    why = follow(plan, curve_key, normalized_address(channel.here), files)
    log.error("vllm: this host cannot run its ranks: %s", why)
    with contextlib.suppress(RankLost):
        channel.send(why.encode(), PLAN_S)
    end_processes(process_tree(), END_S)
    folder.close()
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
