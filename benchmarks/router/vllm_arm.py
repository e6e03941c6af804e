"""vLLM's front end: its own server, whose engine computes nothing. Only the API server's process is measured."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.router.arm import Arm, wait_ready
from benchmarks.stack import free_port
from common.machine.child_process import ChildProcess
from common.model_files.files import ModelFiles

READY_S: Final = 600.0
"""It takes a minute on a machine that does nothing else."""
END_S: Final = 20.0
MAX_MODEL_LEN: Final = 200_000
EXECUTOR: Final = Path(__file__).with_name("vllm_executor.py")
FLAGS: Final = (
    *("--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "1024"),
    *("--max-num-batched-tokens", "262144", "--no-enable-prefix-caching", "--no-async-scheduling", "--enforce-eager"),
    *("--disable-uvicorn-access-log", "--distributed-executor-backend", "vllm_executor.StandInExecutor"),
)
SHAPE: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": MAX_MODEL_LEN,
    "torch_dtype": "bfloat16",
}
"""Of a model that is never loaded."""


class Unpaced:
    """The engine makes tokens as fast as it can, and obeys nothing."""

    def ask(self, *command: Any) -> None:
        """Nothing follows a command."""


class VllmArm(Arm):
    """`python` is that of an environment with vLLM, `files` has the tokenizer and the template.

    Its streams run as fast as they can while others are opened, so that a thousand take minutes to begin.
    """

    paced, most_streams, stream_tokens = False, 200, MAX_MODEL_LEN // 2

    def __init__(self, num_clients: int, python: Path, files: ModelFiles, token_id: int, log_dir: Path) -> None:
        super().__init__("vLLM's front end", num_clients)
        self._python, self._files, self._token_id = python, files, token_id
        self._process = ChildProcess("vllm", log_dir / "vllm.log", group=True)

    @property
    def pids(self) -> list[int]:
        """The API server; the engine is a process of its own."""
        return [self.pid]

    def start(self) -> None:
        self.source, self.port = Unpaced(), free_port()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="diptych-vllm-")))
        self._write_model(folder)
        command = [str(self._python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        command += ["--served-model-name", self.model, "--host", "127.0.0.1", "--port", str(self.port), *FLAGS]
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        env |= {"PYTHONPATH": str(folder), "STAND_IN_TOKEN": str(self._token_id), "VLLM_CPU_KVCACHE_SPACE": "1"}
        env |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        self._process.launch(command, env, cwd=folder)
        self._stack.callback(self._process.stop, END_S)
        self.pid = self._process.pid
        wait_ready(self._process, f"http://127.0.0.1:{self.port}/health", READY_S)

    def _write_model(self, folder: Path) -> None:
        files = self._files
        shutil.copy(EXECUTOR, folder)
        shutil.copy(files.tokenizer, folder / "tokenizer.json")
        (folder / "config.json").write_text(json.dumps(SHAPE | {"vocab_size": files.vocab_size}))
        told: dict[str, object] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": files.eos_token,
            "bos_token": files.bos_token,
        }
        told |= {"chat_template": files.chat_template or "", "model_max_length": MAX_MODEL_LEN}
        (folder / "tokenizer_config.json").write_text(json.dumps(told))
