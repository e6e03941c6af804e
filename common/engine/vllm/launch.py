"""Starts vLLM's engine: its arguments from our settings, its processes, and errors in one sentence."""

from __future__ import annotations

import contextlib
import json
import logging
import logging.config
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from common.config import WorkerConfig
from common.engine.vllm.client import DraftCounter
from common.engine.vllm.core_log import MAX_REASON_CHARS, WORKER_PID, first_error, write_logging_config
from common.errors import MAX_SHOWN_CHARS, ConfigError, ModelError, RankLost, UsageError
from common.model_files import GENERATES, ModelFiles, ServedTask

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)
CONNECTOR = "DiptychConnector"
CONNECTOR_MODULE = "common.engine.vllm.connector"
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""Environment variable of vLLM with the size of the KV cache on a CPU, in whole GiB."""
RULES_MODULE = "common.engine.vllm.token_rules"
START_S = 3600.0
"""Maximum time, in seconds, to load a model. A large one compiles for many minutes."""
CHECK_S = 0.5
PROGRESS_S = 10.0
"""Interval, in seconds, of log lines during the start."""
STOP_S = 5.0
"""Time, in seconds, that vLLM's processes get to end after SIGTERM."""
ADDITIONS = re.compile(
    r"For further information visit \S+|\[type=\w+, input_value=.*?\]|Supported architectures: dict_keys.*"
    r"|Try increasing `gpu_memory_utilization`.*",
    re.DOTALL,
)
"""Parts of messages that help only developers of vLLM, the list of architectures, and advice with other settings."""
JSON_PARSER = re.compile(r"<function loads at 0x\w+>")
ADVICE: Mapping[str, tuple[str, ...]] = {
    "Lower --gpu-memory-utilization, --max-model-len or --max-num-seqs, or use more GPUs": (
        *("out of memory", "OutOfMemoryError", "Cannot allocate"),
    ),
    "Raise --kv-memory-gib, --gpu-memory-utilization or --num-blocks, or lower --max-model-len": (
        *("KV cache is needed", "No available memory for the cache blocks"),
    ),
}
"""Remedies, and parts of the messages to which they apply."""


@dataclass(frozen=True, slots=True)
class CoreFiles:
    """Files of one start of vLLM in a private folder: the socket of block events, and the errors of its processes.

    `loaded` exists once vLLM has loaded the model and computed a token.
    """

    folder: Path
    errors: Path = field(init=False)
    loaded: Path = field(init=False)
    logging: Path = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "errors", self.folder / "errors.log")
        object.__setattr__(self, "loaded", self.folder / "loaded")
        object.__setattr__(self, "logging", self.folder / "logging.json")

    @property
    def events_address(self) -> str:
        return f"ipc://{self.folder / 'events'}"


def prepare_files(level: str, files: CoreFiles) -> None:
    """Set the variables for the log, the sockets and the temporary files of vLLM's processes.

    The first call must precede the first import of vLLM. vLLM does not remove its sockets and temporary files, so they
    are created in our folder. The cache of compiled code has to outlive it.
    """
    write_logging_config(files.logging, files.errors, files.loaded, level)
    if "vllm" in sys.modules:  # after a sleep: vLLM configures logging at its first import only
        logging.config.dictConfig(json.loads(files.logging.read_text()))
    os.environ.setdefault(INDUCTOR_CACHE, f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
    folder = str(files.folder)
    paths = {"VLLM_LOGGING_CONFIG_PATH": str(files.logging), "VLLM_RPC_BASE_PATH": folder, "TMPDIR": folder}
    os.environ.update(paths | {WORKER_PID: str(os.getpid())})


def prepare_memory(config: WorkerConfig) -> None:
    """Let the setting for the size of the KV cache win over vLLM's variable."""
    if config.kv_memory_gib:
        os.environ.pop(KV_SPACE, None)  # overrides the argument


def engine_arguments(config: WorkerConfig, files: ModelFiles, task: ServedTask = GENERATES) -> list[str]:
    """Return vLLM's arguments for our settings, followed by those of the user, which override them."""
    if files.format != "hf" or files.config is None:
        raise ModelError(f"{files.model_id} is a .gguf file: --engine vllm needs a folder in Hugging Face's format")
    arguments = [
        *("--model", str(files.config.parent)),
        *("--served-model-name", files.model_id),
        *("--seed", "0"),
        *("--max-logprobs", "-1"),
        *("--generation-config", "vllm"),
        *("--scheduling-policy", "priority"),
        *("--structured-outputs-config", '{"backend": "guidance"}'),
    ]
    # vLLM's kernels for CPUs apply the last place to requests without an adapter, so that place stays empty.
    num_empty = 1 if config.lora_places and not config.on_gpu else 0
    values: Mapping[str, object] = {
        "--tensor-parallel-size": config.tensor_parallel_size if config.tensor_parallel_size > 1 else 0,
        "--max-model-len": config.max_model_len,
        "--dtype": config.dtype if config.dtype != "auto" else "",
        "--block-size": config.block_size,
        "--num-gpu-blocks-override": config.num_blocks,
        "--max-num-seqs": getattr(config, "max_num_seqs", 0),
        "--max-num-batched-tokens": getattr(config, "max_num_batched_tokens", 0),
        "--max-loras": config.lora_places + num_empty,
        "--max-lora-rank": config.max_lora_rank if config.lora_places else 0,
    }
    for name, value in values.items():
        arguments += [name, str(value)] if value else []
    if config.kv_gib:
        arguments += ["--kv-cache-memory-bytes", str(int(config.kv_gib * 2**30))]
    else:
        arguments += ["--gpu-memory-utilization", str(config.gpu_memory_utilization)]
    if config.lora_places:
        arguments.append("--enable-lora")
    if config.log_level != "debug":
        arguments.append("--no-use-tqdm-on-load")
    if not config.enable_prefix_caching:
        arguments.append("--no-enable-prefix-caching")
    return [*arguments, *pooling_arguments(task), *config.engine_args]


def pooling_arguments(task: ServedTask) -> list[str]:
    """Return vLLM's arguments for a model that pools prompts. The router normalises vectors and scores."""
    if task.generates:
        return []
    kind = "embed" if task.name == "embed" else "classify"
    pooler = {"task": kind, "pooling_type": task.pooling.upper(), "use_activation": False}
    arguments = ["--runner", "pooling", "--convert", kind, "--pooler-config", json.dumps(pooler)]
    if task.answers is not None:  # vLLM subtracts their rows of the output layer
        tokens = {"method": "from_2_way_softmax", "classifier_from_token": ["no", "yes"]}
        arguments += ["--hf-overrides", json.dumps(tokens)]
    return arguments


def engine_config(
    arguments: Sequence[str], files: CoreFiles, extra_config: Mapping[str, Any], *, is_headless: bool = False
) -> VllmConfig:
    """Return vLLM's configuration. `extra_config`: `kv_connector_extra_config`. `is_headless`: for ranks only.

    Raises UsageError for an invalid argument, ModelError if vLLM does not support the model or the combination.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise UsageError("engine_args", f"invalid arguments for vLLM: {shortened(message)}")

    transfer = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(extra_config),
    }
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": files.events_address}
    own = ["--kv-transfer-config", json.dumps(transfer), "--kv-events-config", json.dumps(events)]
    parser = AsyncEngineArgs.add_cli_args(Parser(prog="vllm", add_help=False, allow_abbrev=False))
    given = parser.parse_args([*arguments, *own])
    try:
        config: VllmConfig = AsyncEngineArgs.from_cli_args(given).create_engine_config(headless=is_headless)
    except (ConfigError, ModelError):
        raise
    except Exception as error:
        raise ModelError(f"vLLM refuses the model or its settings: {one_line(error)}") from error
    if config.speculative_config is not None and config.observability_config.per_request_spec_decode_metrics == "none":
        config.observability_config.per_request_spec_decode_metrics = "summary"
    if config.parallel_config.data_parallel_size > 1:
        raise ConfigError("engine_args", "--data-parallel-size", "omitted: start more workers instead")
    if config.speculative_config is None and config.model_config.runner_type == "generate":
        runner = "SecondRunnerRules" if config.use_v2_model_runner else "FirstRunnerRules"
        config.model_config.logits_processors = [
            *(config.model_config.logits_processors or ()),
            f"{RULES_MODULE}:{runner}",
        ]
    return config


def one_line(error: BaseException) -> str:
    """Return an error's message in one line. pydantic's errors have a heading, and a footer with a link."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        messages = dict.fromkeys(_message_of(each) for each in errors())
        return shortened("; ".join(message for message in messages if message))
    return shortened(str(error)) or type(error).__name__


def _message_of(error: Mapping[str, Any]) -> str:
    """Return a message of pydantic, with the name of the field and its value, which most do not mention."""
    message = str(error.get("msg", "")).removeprefix("Value error, ")
    names = [str(each) for each in error.get("loc", ()) if isinstance(each, str)]
    if not names or names[-1] in message:
        return message
    return f"{names[-1]}={str(error.get('input'))[:MAX_SHOWN_CHARS]}: {message}"


def shortened(message: str) -> str:
    """Return a message of vLLM in one line of limited length, without Python's and pydantic's additions."""
    text = " ".join(ADDITIONS.sub("", JSON_PARSER.sub("JSON", message)).split())
    return text if len(text) <= MAX_REASON_CHARS else f"{text[:MAX_REASON_CHARS]}..."


def start_core(
    config: VllmConfig,
    files: CoreFiles,
    drafts: DraftCounter,
    failure: Callable[[], str] = lambda: "",
    *,
    deadline_s: float = START_S,
) -> AsyncLLM:
    """Start vLLM's processes and load the model. Blocks. Raises ModelError with the reason if that fails.

    `failure` returns why another host cannot load its part, or "". Raises RankLost with this reason.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    began, before = time.monotonic(), process_tree()
    result: list[AsyncLLM | BaseException] = []

    def start() -> None:
        # The processes inherit the mask. Ctrl-C must not reach them, because running requests still need them.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            result.append(AsyncLLM.from_vllm_config(config, stat_loggers=[drafts]))
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=start, name="start-vllm", daemon=True)
    thread.start()
    logged_s = 0.0
    while thread.is_alive():
        thread.join(CHECK_S)
        waited_s = time.monotonic() - began
        if why := failure():
            end_processes(process_tree() - before)
            raise RankLost(why)
        if thread.is_alive() and waited_s > deadline_s:
            end_processes(process_tree() - before)
            raise ModelError(f"vLLM did not load the model within {deadline_s:g} s: see its log above")
        if waited_s - logged_s >= PROGRESS_S:
            logged_s = waited_s
            log.info("vllm: loading the model, %.0f s so far", waited_s)
    found = result[0]
    if isinstance(found, BaseException):
        end_processes(process_tree() - before)
        if why := failure():
            raise RankLost(why) from found
        raise ModelError(start_problem(found, files)) from found
    log.info("vllm: loaded the model in %.1f s", time.monotonic() - began)
    return found


def start_problem(error: BaseException, files: CoreFiles) -> str:
    """Return why vLLM could not start, in one sentence with a remedy if there is one."""
    reason = shortened(first_error(files.errors)) or one_line(error)
    advice = next((advice for advice, marks in ADVICE.items() if any(mark in reason for mark in marks)), "")
    if advice:
        reason = f"{reason.removesuffix('.')}. {advice}"
    return f"vLLM cannot load the model: {reason}"


def process_tree() -> frozenset[int]:
    """Return the ids of all descendants of this process, except Python's resource trackers.

    A tracker ends when this process does, and then removes shared memory of processes that were killed.
    """
    import psutil  # type: ignore[import-untyped]

    found = set()
    with contextlib.suppress(psutil.Error):
        for each in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if not any("resource_tracker" in word for word in each.cmdline()):
                    found.add(each.pid)
    return frozenset(found)


def kill_processes(pids: frozenset[int]) -> None:
    """Kill these processes without waiting for their end."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def end_processes(pids: frozenset[int], timeout_s: float = STOP_S) -> None:
    """End these processes: with SIGTERM, and after `timeout_s` with SIGKILL."""
    import psutil

    left = []
    for pid in pids:
        try:
            left.append(psutil.Process(pid))
        except psutil.Error:
            continue
    for signal_all in ("terminate", "kill"):
        for each in left:
            try:
                getattr(each, signal_all)()
            except psutil.Error:
                continue
        _, left = psutil.wait_procs(left, timeout=timeout_s)
    multiprocessing.active_children()  # reaps those that have ended
