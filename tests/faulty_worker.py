"""A worker whose faults a test controls. Arguments: ROLE, FAULT=VALUE ..., flags of the worker.

    hang=FILE             once FILE exists, the next step never ends; if FILE contains "0.3", each step takes 0.3 s
                          longer, and with "0.3 a token" 0.3 s longer for each of its tokens
    longest-step=SECONDS  how long a step of which nothing is known may take, instead of a minute
    slow-start=FILE       while FILE exists, the event loop blocks before the engine starts
    slow-vocabulary=FILE  the vocabulary of grammars is built only once FILE exists
    poison=IDS            the worker kills itself if a prompt starts with these token ids, separated by commas
    xid=IDS               the device of the worker fails for good, like a GPU with an Xid, at such a prompt
    cuda=pretended        the KV cache is in memory of a pretended GPU, and `--kv-transport cuda-ipc` is accepted

With the role `serve`, `diptych serve` runs instead, and its worker decode-1 has the faults.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

VICTIM = "decode-1"
POLL_S = 0.05


def hang(value: str) -> None:
    from common.engine.run.runner import ModelRunner

    run, file = ModelRunner.run, Path(value)

    def run_or_hang(self: ModelRunner, *arguments: Any) -> Any:
        if file.exists():
            seconds, _, per_token = file.read_text().partition(" ")
            count = arguments[0].num_tokens if per_token else 1
            threading.Event().wait(float(seconds) * count if seconds else None)
        return run(self, *arguments)

    ModelRunner.run = run_or_hang  # type: ignore[method-assign]


def longest_step(value: str) -> None:
    from common.engine.worker import step_times

    step_times.LONGEST_S = float(value)  # type: ignore[misc]


def slow_start(value: str) -> None:
    from common.engine.worker.process import WorkerProcess

    start, file = WorkerProcess._start_engine, Path(value)

    def wait_while_it_exists() -> None:
        while file.exists():
            time.sleep(POLL_S)

    async def start_slowly(self: WorkerProcess, *arguments: Any) -> None:
        wait_while_it_exists()  # like an import or a compiler, it blocks the event loop
        await start(self, *arguments)

    WorkerProcess._start_engine = start_slowly  # type: ignore[method-assign]


def slow_vocabulary(value: str) -> None:
    from common.grammar import grammars

    build, file = grammars.build_vocabulary, Path(value)

    def build_slowly(*model: Any) -> Any:
        while not file.exists():
            time.sleep(POLL_S)
        return build(*model)

    grammars.build_vocabulary = build_slowly


def poison(value: str) -> None:
    from common.engine.run.runner import ModelRunner

    prepare, ids = ModelRunner.prepare, [int(token) for token in value.split(",")]

    def prepare_or_die(self: ModelRunner, chunks: Any) -> Any:
        if any(chunk.start == 0 and list(chunk.token_ids[: len(ids)]) == ids for chunk in chunks):
            os.kill(os.getpid(), signal.SIGKILL)
        return prepare(self, chunks)

    ModelRunner.prepare = prepare_or_die  # type: ignore[method-assign]


def xid(value: str) -> None:
    import torch

    from common.engine.run.runner import ModelRunner

    run, wait, ids, failed = ModelRunner.run, ModelRunner.wait, [int(token) for token in value.split(",")], []

    def raise_if_failed() -> None:
        if failed:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure\nCompile with TORCH_USE_CUDA_DSA")

    def run_or_fail(self: ModelRunner, batch: Any) -> Any:
        starts = (batch.token_ids == ids[0]).nonzero().flatten().tolist()
        failed.extend(at for at in starts if batch.token_ids[at : at + len(ids)].tolist() == ids)
        raise_if_failed()
        return run(self, batch)

    def wait_or_fail(self: ModelRunner) -> None:
        raise_if_failed()
        wait(self)

    ModelRunner.run, ModelRunner.wait = run_or_fail, wait_or_fail  # type: ignore[method-assign]


def cuda(_: str) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from common.config import WorkerConfig
    from tests import pretended_cuda

    usual = WorkerConfig.check

    def check(self: WorkerConfig) -> None:
        with patch.object(WorkerConfig, "exports_kv", False):  # the device is the CPU, which exports no memory
            usual(self)

    WorkerConfig.check = check  # type: ignore[method-assign]
    pretended_cuda.use()


FAULTS = {
    "hang": hang,
    "longest-step": longest_step,
    "slow-start": slow_start,
    "slow-vocabulary": slow_vocabulary,
    "poison": poison,
    "xid": xid,
    "cuda": cuda,
}


def serve(faults: Sequence[str], flags: list[str]) -> int:
    from router.cli.serve.child import Child
    from router.cli.serve.serve import main

    usual = Child.command

    def command(self: Child) -> list[str]:
        words = usual(self)  # python -P -m MODULE flags
        return words if self.name != VICTIM else [*words[:2], __file__, "decode", *faults, *words[4:]]

    Child.command = command  # type: ignore[method-assign]
    return main(flags)


def main(role: str, *arguments: str) -> int:
    faults = [word for word in arguments if word.partition("=")[0] in FAULTS]
    flags = [word for word in arguments if word not in faults]
    if role == "serve":
        return serve(faults, flags)
    for fault in faults:
        name, _, value = fault.partition("=")
        FAULTS[name](value)
    status: int = importlib.import_module(f"{role}_worker.__main__").main(flags)
    return status


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
