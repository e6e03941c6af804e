"""Arguments of vLLM for our settings, and errors of its start in one sentence."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from logging.config import dictConfig
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from common.config import DecodeWorkerConfig, PrefillWorkerConfig
from common.engine.vllm import core_log, launch
from common.engine.vllm.client import DraftCounter
from common.engine.vllm.core_log import WORKER_PID, first_error, last_error, write_logging_config
from common.engine.vllm.launch import (
    INDUCTOR_CACHE,
    KV_SPACE,
    CoreFiles,
    engine_arguments,
    one_line,
    prepare_files,
    prepare_memory,
    shortened,
    start_problem,
)
from common.errors import ModelError, RankLost
from common.model_files import GENERATES, ModelFiles, ServedTask

RANK_ERROR = """ERROR WorkerProc failed to start.
Traceback (most recent call last):
  File "worker.py", line 1, in load
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
ERROR EngineCore failed to start.
Traceback (most recent call last):
Exception: WorkerProc initialization failed due to an exception in a background process.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def files(**given: Any) -> ModelFiles:
    values: dict[str, Any] = {"format": "hf", "config": Path("/models/m/config.json"), "weights": ()} | given
    return ModelFiles(
        model_id="org/m", tokenizer=Path("/t"), eos_token_ids=(1,), max_model_len=64, vocab_size=9, weights_hash="",
        **values,
    )  # fmt: skip


def given(config: DecodeWorkerConfig | PrefillWorkerConfig, task: ServedTask = GENERATES) -> dict[str, str]:
    arguments = engine_arguments(config, files(), task)
    return {name: value for name, value in zip(arguments, [*arguments[1:], ""], strict=True) if name.startswith("--")}


def test_settings_that_both_have_reach_vllm() -> None:
    config = DecodeWorkerConfig(
        engine="vllm", device="cuda", dtype="bfloat16", max_model_len=4096, max_num_seqs=7, tensor_parallel_size=2,
        gpu_memory_utilization=0.8, enable_prefix_caching=False, max_loras=3,
    )  # fmt: skip
    found = given(config)
    wanted = {
        "--model": "/models/m",
        "--served-model-name": "org/m",
        "--dtype": "bfloat16",
        "--max-model-len": "4096",
        "--max-num-seqs": "7",
        "--tensor-parallel-size": "2",
        "--gpu-memory-utilization": "0.8",
        "--max-loras": "3",
    }
    assert {name: found[name] for name in wanted} == wanted
    assert {"--enable-lora", "--no-enable-prefix-caching"} <= set(found)


def test_the_last_place_of_adapters_stays_empty_on_cpus() -> None:
    """There vLLM would add the adapter in it to the base model's answers."""
    found = given(DecodeWorkerConfig(engine="vllm", device="cpu", max_loras=3))
    assert found["--max-loras"] == "4"


def test_what_is_not_set_is_left_to_vllm() -> None:
    found = given(DecodeWorkerConfig(engine="vllm", device="cpu"))
    assert not {"--dtype", "--max-model-len", "--max-num-seqs", "--block-size", "--gpu-memory-utilization"} & set(found)
    assert given(PrefillWorkerConfig(engine="vllm", max_num_batched_tokens=512))["--max-num-batched-tokens"] == "512"


def test_the_kv_cache_may_have_a_fraction_of_a_gibibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {KV_SPACE: "3"})
    own, ours = (DecodeWorkerConfig(engine="vllm", device="cpu", kv_memory_gib=size) for size in (0.0, 0.25))
    prepare_memory(own)
    assert os.environ[KV_SPACE] == "3", "the variable counts unless our setting is given"
    prepare_memory(ours)
    assert KV_SPACE not in os.environ
    assert given(ours)["--kv-cache-memory-bytes"] == str(2**28)


def test_own_arguments_of_vllm_come_last() -> None:
    config = DecodeWorkerConfig(engine="vllm", engine_args=("--dtype", "half", "--enforce-eager"), dtype="float32")
    assert engine_arguments(config, files())[-3:] == ["--dtype", "half", "--enforce-eager"]


@pytest.mark.parametrize(
    ("task", "convert", "pooling_type"),
    [
        (ServedTask("embed", "mean", 8, normalise=True), "embed", "MEAN"),
        (ServedTask("score", "last", 1, sigmoid=True), "classify", "LAST"),
        (ServedTask("score", "last", 1, answers=(7, 8)), "classify", "LAST"),
    ],
    ids=["embed", "score", "answers"],
)
def test_vllm_pools_prompts_as_the_task_requires(task: ServedTask, convert: str, pooling_type: str) -> None:
    """The router normalises, so vLLM must not."""
    found = given(PrefillWorkerConfig(engine="vllm", device="cpu"), task)
    pooler = {"task": convert, "pooling_type": pooling_type, "use_activation": False}
    assert (found["--runner"], found["--convert"]) == ("pooling", convert)
    assert json.loads(found["--pooler-config"]) == pooler
    head = json.loads(found.get("--hf-overrides", "{}"))
    assert head.get("classifier_from_token") == (["no", "yes"] if task.answers else None)


def test_a_model_that_generates_does_not_pool() -> None:
    assert not {"--runner", "--pooler-config"} & set(given(PrefillWorkerConfig(engine="vllm", device="cpu")))


def test_gguf_files_are_refused() -> None:
    with pytest.raises(ModelError, match="gguf"):
        engine_arguments(DecodeWorkerConfig(engine="vllm"), files(format="gguf", config=None))


def test_the_first_error_is_the_reason(tmp_path: Path) -> None:
    core = CoreFiles(tmp_path)
    core.errors.write_text(RANK_ERROR)
    why = start_problem(RuntimeError("Engine core initialization failed. See root cause above."), core)
    assert why.startswith("vLLM cannot load the model: OutOfMemoryError: CUDA out of memory. Tried")
    assert "--gpu-memory-utilization" in why and "\n" not in why
    assert start_problem(RuntimeError("no luck"), CoreFiles(tmp_path / "none")) == "vLLM cannot load the model: no luck"


@pytest.mark.parametrize(
    "reason",
    [
        "To serve at least one request, 2 GiB KV cache is needed. The estimated maximum model length is 896.",
        "No available memory for the cache blocks.",
    ],
)
def test_a_cache_that_is_too_small_is_explained_with_our_settings(tmp_path: Path, reason: str) -> None:
    core = CoreFiles(tmp_path)
    core.errors.write_text(
        f"ValueError: {reason} Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing "
        "the engine. See https://docs.vllm.ai/conserving_memory/ for more details.\n"
    )
    advice = "Raise --kv-memory-gib, --gpu-memory-utilization or --num-blocks, or lower --max-model-len"
    why = start_problem(RuntimeError("Engine core initialization failed."), core)
    assert why == f"vLLM cannot load the model: {reason} {advice}"


KILLER = """
import multiprocessing.resource_tracker, os, subprocess
from common.engine.vllm.launch import kill_processes, process_tree
multiprocessing.resource_tracker.ensure_running()
tracker = multiprocessing.resource_tracker._resource_tracker._pid
while b"import main" not in open(f"/proc/{tracker}/cmdline", "rb").read():
    pass  # a process that starts has no command line yet
parent = subprocess.Popen(["sh", "-c", "sleep 600 & wait"])
while len(process_tree()) < 2:
    pass
kill_processes(process_tree())
print(parent.wait(), os.waitpid(tracker, os.WNOHANG)[0])
"""


def test_processes_of_an_abandoned_start_are_killed_and_their_shared_memory_is_removed() -> None:
    found = subprocess.run([sys.executable, "-P", "-c", KILLER], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.split() == ["-9", "0"], found.stderr


def test_a_host_that_is_lost_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM waits for the ranks of the host, which never come."""
    never = threading.Event()

    class AsyncLLM:
        from_vllm_config = staticmethod(lambda config, stat_loggers: never.wait(30))

    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.async_llm", SimpleNamespace(AsyncLLM=AsyncLLM))
    monkeypatch.setattr(launch, "CHECK_S", 0.01)
    monkeypatch.setattr(launch, "end_processes", lambda pids: never.set())
    config: Any = object()
    with pytest.raises(RankLost, match="^host 1 is gone$"):
        launch.start_core(config, CoreFiles(tmp_path), DraftCounter(), lambda: "host 1 is gone")
    assert never.is_set()


def test_the_last_error_ended_an_engine_that_has_run(tmp_path: Path) -> None:
    errors = CoreFiles(tmp_path).errors
    before = "Traceback\nValueError: a request was bad\n"
    errors.write_text(
        f"{before}Traceback\nRuntimeError: CUDA error: an illegal memory access\n{RANK_ERROR.splitlines()[-2]}"
    )
    assert last_error(errors, len(before)) == "RuntimeError: CUDA error: an illegal memory access"
    errors.write_text(before)
    assert last_error(errors, len(before)) == ""


def test_processes_leave_only_their_compiled_code_outside_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    prepare_files("info", CoreFiles(tmp_path))
    assert os.environ["TMPDIR"] == os.environ["VLLM_RPC_BASE_PATH"] == str(tmp_path)
    assert not os.environ[INDUCTOR_CACHE].startswith(str(tmp_path))


def test_processes_log_errors_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = CoreFiles(tmp_path)
    write_logging_config(core.logging, core.errors, core.loaded, "info")
    monkeypatch.setenv(WORKER_PID, str(os.getpid()))  # otherwise it would watch this process
    dictConfig(json.loads(core.logging.read_text()))
    try:
        raise ValueError("the model has no layers")
    except ValueError:
        logging.getLogger("vllm.core").exception("EngineCore failed")
    assert first_error(core.errors) == "the model has no layers"


FAILING = """
import json, logging, logging.config, multiprocessing, sys
from pathlib import Path
from common.engine.vllm.core_log import first_error, write_logging_config

folder, level, message, *loaded = sys.argv[1:]
config, errors, done = (Path(folder) / name for name in ("config", "errors", "loaded"))

def main():
    logging.config.dictConfig(json.loads(config.read_text()))
    try:
        raise ValueError("the model has no layers")
    except ValueError:
        logging.getLogger("vllm.core").exception(message)
        raise

write_logging_config(config, errors, done, level)
if loaded:
    done.touch()
process = multiprocessing.get_context("fork").Process(target=main)
process.start()
process.join()
print(process.exitcode, first_error(errors))
"""


@pytest.mark.parametrize(
    ("arguments", "num_tracebacks"),
    [
        (["info", "EngineCore failed to start."], 0),
        (["info", "EngineCore encountered a fatal error."], 0),
        (["debug", "EngineCore failed to start."], 2),
        (["info", "EngineCore encountered a fatal error.", "loaded"], 2),
    ],
)
def test_a_start_that_fails_prints_its_traceback_at_level_debug_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], num_tracebacks: int
) -> None:
    """The process logs the error, and multiprocessing prints it."""
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    command = [sys.executable, "-P", "-c", FAILING, str(tmp_path), *arguments]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "1 the model has no layers\n", found.stderr
    assert found.stderr.count("Traceback") == num_tracebacks
    assert num_tracebacks or found.stderr.count("\n") == 1 and "--log-level debug" in found.stderr


@pytest.mark.parametrize(
    ("level", "own", "shown"), [("info", "", "WARNING"), ("debug", "", "INFO"), ("info", "debug", "DEBUG")]
)
def test_vllm_logs_less_than_we_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    level: str,
    own: str,
    shown: str,
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", own)
    monkeypatch.setenv(WORKER_PID, str(os.getpid()))
    core = CoreFiles(tmp_path)
    write_logging_config(core.logging, core.errors, core.loaded, level)
    found = json.loads(core.logging.read_text())
    assert found["loggers"]["vllm"]["level"] == shown
    found["loggers"]["pretended"] = found["loggers"].pop("vllm")
    dictConfig(found)
    for message in ("Enforce eager set, disabling %s", "no NUMA node for %s"):
        logging.getLogger("pretended").warning(message, "x")
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(": ")[2] for line in lines if "NUMA" in line] == ["no NUMA node for x"]
    assert len(lines) == (1 if shown == "WARNING" else 2)


def test_a_process_whose_parent_ended_before_the_watch_began_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    parents: list[Any] = [SimpleNamespace(pid=77), None, None]  # known once the process has been unpickled
    found: list[str] = []
    monkeypatch.setattr("multiprocessing.parent_process", lambda: parents.pop() if len(parents) > 1 else parents[0])
    monkeypatch.setattr("os.getppid", lambda: 1)
    monkeypatch.setattr(core_log, "WATCH_S", 0.001)
    monkeypatch.setattr("common.engine.vllm.link.exit_orphaned", found.append)
    watch = threading.Thread(target=core_log._watch_parent, args=(os.getppid(),), daemon=True)
    watch.start()
    watch.join(10.0)
    assert found == ["its parent process has ended"]


class FieldErrors(Exception):
    """An error of pydantic."""

    def errors(self) -> list[dict[str, Any]]:
        low = {"loc": ("max_num_seqs",), "input": 0, "msg": "Input should be greater than or equal to 1"}
        return [low, low, {"loc": (), "input": {}, "msg": "Value error, the heads do not fit"}]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FieldErrors(), "max_num_seqs=0: Input should be greater than or equal to 1; the heads do not fit"),
        (ValueError("Value {bad cannot be converted to <function loads at 0x7fcc98c20>."),
         "Value {bad cannot be converted to JSON."),
        (ValueError("1 error for C\n  Should be an object [type=t, input_value=5, input_type=int]\n"
         "    For further information visit https://errors.pydantic.dev/2/v/t"),
         "1 error for C Should be an object"),
        (ValueError("['No'] are not supported for now. Supported architectures: dict_keys(['A', 'B'])"),
         "['No'] are not supported for now."),
        (ValueError(), "ValueError"),
    ],
)  # fmt: skip
def test_messages_of_vllm_are_one_line_that_names_the_field(error: Exception, expected: str) -> None:
    assert one_line(error) == expected


def test_messages_of_vllm_have_a_limit() -> None:
    assert len(shortened("word " * 10_000)) <= core_log.MAX_REASON_CHARS + 3
