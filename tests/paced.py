"""Paced workers: real worker processes around a model that waits as long as coefficients say, and computes next to
nothing, for clusters that are larger than the machine.

Each token's KV is a running sum over all tokens before it, and the next token is a hash of that sum. So an answer
depends on every token before it and on every block that was cached or transferred, and a wrong one is noticed. Tokens
are printable ASCII, from the byte tokenizer of the tiny model.

    python -m tests.paced COEFFICIENTS prefill|decode FLAGS

is such a worker, with its flags, engine, scheduler, sockets and KV bytes. `--model` is a folder that `write_folder`
wrote. The file COEFFICIENTS has the pace of both kinds of worker.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.simulator.world.coefficients import StepCoefficients
from benchmarks.stack import Stack, StackProcess, StackSettings
from common.config import WorkerConfig
from common.engine.kv.cache import KVCache
from common.engine.models.batch import ForwardBatch, SequenceChunk, check_chunk
from common.engine.run.loaded import LoadedModel, ModelFactories
from common.engine.run.runner import ModelRunner
from common.engine.worker.command import run_role
from common.engine.worker.contract import DutyOffer
from common.engine.worker.loop_model import LoopModel
from common.engine.worker.process import WorkerProcess, end_process
from common.errors import ConfigError, ModelError
from common.latency.step_model import StepShape
from common.model_files.config import ModelConfig, from_hf
from common.model_files.files import ModelFiles
from common.model_files.tiny import make_tiny_model
from common.wire.message_fields import ROLES
from kernels.interface.attention_plan import AttentionPlan, QuerySpan

log = logging.getLogger(__name__)
FIRST_TOKEN, NUM_TOKENS = 32, 95
"""Printable ASCII."""
BYTES_EACH = 8
"""KV is made of 64-bit sums: a token's KV is a multiple of this."""
LOGIT = 30.0

Sums = NDArray[np.uint64]


class Coefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The pace of both kinds of worker, and the bytes of a token's KV."""

    prefill: StepCoefficients
    decode: StepCoefficients
    kv_bytes: int = 1024

    @classmethod
    def read(cls, file: Path) -> Coefficients:
        """Raises ModelError for a file that is missing or not of this form."""
        try:
            found = msgspec.json.decode(file.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:  # a ValidationError is one
            raise ModelError(f"{file} does not hold coefficients: {error}") from error
        if found.kv_bytes < BYTES_EACH or found.kv_bytes % BYTES_EACH:
            raise ModelError(f"kv_bytes {found.kv_bytes} in {file}: a multiple of {BYTES_EACH} is needed")
        return found


def write_folder(coefficients: Coefficients, folder: Path, max_model_len: int) -> Path:
    """Write a model folder: a byte tokenizer, and a configuration whose KV has `kv_bytes` a token in float32."""
    make_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": coefficients.kv_bytes // BYTES_EACH,  # keys and values of 4 bytes
        "max_position_embeddings": max_model_len,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class PacedModel:
    """The `Model` of a folder that `write_folder` wrote; `PacedRunner` runs it."""

    dtype = torch.float32
    device = torch.device("cpu")
    quantization = "none"

    def __init__(self, folder: Path) -> None:
        self.config: ModelConfig = from_hf(folder / "config.json")

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Logits float32 [num sampled rows, vocab_size]; the KV of the batch's tokens is written into `kv`."""
        plan = batch.plan
        assert isinstance(plan, PacedPlan)  # of `PacedRunner.prepare`
        blocks = kv.tensor.view(torch.int64).numpy().view(np.uint64).reshape(kv.num_blocks, kv.block_size, -1)
        token_ids = batch.token_ids.numpy()
        sums = np.concatenate([_run(span, token_ids, blocks) for span in plan.spans])
        sampled = sums if batch.sampled is None else sums[batch.sampled.numpy()]
        next_ids = FIRST_TOKEN + (_mixed(sampled) % np.uint64(NUM_TOKENS)).astype(np.int64)
        logits = torch.zeros(len(next_ids), self.config.vocab_size)
        logits[torch.arange(len(next_ids)), torch.from_numpy(next_ids)] = LOGIT
        return logits


@dataclass(frozen=True, slots=True)
class PacedPlan(AttentionPlan):
    """The chunks of a step."""

    spans: Sequence[QuerySpan]


class PacedRunner(ModelRunner):
    """Runs a step, and sleeps for what is left of its time."""

    def __init__(self, model: PacedModel, kv: KVCache, coefficients: Coefficients, role: Callable[[], str]) -> None:
        """`role` says at each step which pace the worker has: to "decode", chunks of one token are decoded rows."""
        super().__init__(model, kv)
        self._models = {"prefill": coefficients.prefill.model(), "decode": coefficients.decode.model()}
        self._role, self._latest_role = role, ""

    def prepare(self, chunks: Sequence[SequenceChunk]) -> ForwardBatch:
        spans: list[QuerySpan] = []
        token_ids: list[int] = []
        sampled: list[int] = []
        for chunk in chunks:
            check_chunk(chunk, self.model.config, self.kv)
            spans.append(QuerySpan(len(token_ids), len(chunk.token_ids), chunk.start, chunk.block_table))
            token_ids.extend(chunk.token_ids)
            first = len(token_ids) - (len(chunk.token_ids) if chunk.all_logits else 1)
            sampled.extend(range(first, len(token_ids)) if chunk.sample or chunk.all_logits else ())
        positions = torch.cat([torch.arange(span.start, span.length) for span in spans])
        return ForwardBatch(
            num_tokens=len(token_ids),
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            positions=positions,
            slots=positions,  # the plan's block tables say where KV goes
            sampled=torch.tensor(sampled, dtype=torch.int64),
            plan=PacedPlan(spans),
        )

    def run(self, batch: ForwardBatch) -> Tensor:
        began = time.perf_counter()
        logits = super().run(batch)
        plan = batch.plan
        assert isinstance(plan, PacedPlan)
        role = self._role()
        seconds = self._models[role].seconds(_shape(plan.spans, decodes=role == "decode"))
        time.sleep(max(0.0, began + seconds - time.perf_counter()))
        if role != self._latest_role:
            self._latest_role = role
            log.info("first step as a %s worker", role, extra={"step_s": time.perf_counter() - began})
        return logits


def _shape(spans: Sequence[QuerySpan], *, decodes: bool) -> StepShape:
    """With `decodes` a chunk of one token counts as a decoded row, else as part of a prompt."""
    rows = [span for span in spans if decodes and span.num_rows == 1]
    prompts = (span for span in spans if not decodes or span.num_rows > 1)
    of_rows = StepShape.of_rows(len(rows), sum(span.length for span in rows))
    return of_rows + StepShape.sum(StepShape.of_prompt(span.start, span.length) for span in prompts)


def _run(span: QuerySpan, token_ids: NDArray[np.int64], blocks: Sums) -> Sums:
    """Write the KV of a chunk: its sums, uint64 [num_rows]."""
    size = blocks.shape[1]
    table = np.asarray(span.block_table, dtype=np.int64)
    positions = np.arange(span.start, span.length)
    terms = (token_ids[span.row : span.row + span.num_rows].astype(np.uint64) + np.uint64(1)) * _mixed(
        positions.astype(np.uint64)
    )
    if span.start:
        before = span.start - 1
        terms[:1] += blocks[table[before // size], before % size, -1:]
    sums: Sums = np.cumsum(terms, dtype=np.uint64)
    blocks[table[positions // size], positions % size] = sums[:, None]
    return sums


def _mixed(numbers: Sums) -> Sums:
    """A hash of each number: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def answer(token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The greedy answer to a prompt: what any cluster of paced workers must say."""
    known = list(token_ids)
    for _ in range(num_tokens):
        numbers = np.array(known, dtype=np.uint64) + np.uint64(1)
        total = (numbers * _mixed(np.arange(len(known), dtype=np.uint64))).sum(dtype=np.uint64, keepdims=True)
        known.append(FIRST_TOKEN + int(_mixed(total)[0] % np.uint64(NUM_TOKENS)))
    return known[len(token_ids) :]


MODEL: Final = "paced"
EXAMPLE: Final = Path(__file__).parents[1] / "benchmarks" / "data" / "paced.json"
"""Round numbers of about the size that an 8B model on one GPU has."""
MAX_MODEL_LEN: Final = 131_072
START_S: Final = 20.0
"""For each process: two cores import torch for all of them."""


class PacedStack(Stack):
    """A stack of paced workers. `settings` need not name their model.

    `slower` names workers (such as "decode-0") with a file of coefficients of their own.
    Raises ModelError for a file that does not hold coefficients, StackError as `Stack`.
    """

    def __init__(
        self,
        settings: StackSettings,
        *,
        coefficients: Path = EXAMPLE,
        slower: Mapping[str, Path] | None = None,
        max_model_len: int = MAX_MODEL_LEN,
    ) -> None:
        found = Coefficients.read(coefficients)
        self._coefficients, self._slower = coefficients.resolve(), dict(slower or {})
        self._folder = tempfile.TemporaryDirectory(prefix="diptych-paced-")
        model = write_folder(found, Path(self._folder.name) / MODEL, max_model_len)
        super().__init__(
            replace(
                settings,
                model=str(model),
                dtype="float32",
                worker_flags=("--threads", "1", *settings.worker_flags),
                ready_timeout_s=max(settings.ready_timeout_s, START_S * settings.num_processes),
            )
        )

    def _worker(self, role: str, index: int, flags: Sequence[str], cores: Sequence[int]) -> StackProcess:
        name = f"{role}-{index}"
        log = self.log_dir / f"{name}.log"
        file = str(self._slower.get(name, self._coefficients))
        own = ("--worker-id", name, "--address-file", str(log.with_suffix(".json")))
        command = [sys.executable, "-P", "-m", "tests.paced", file, role, *own, *flags]
        return StackProcess(name, role, command, log, cores)

    def stop(self) -> None:
        super().stop()
        self._folder.cleanup()


PROGRAM = "python -m tests.paced"


def load_paced(
    coefficients: Coefficients, files: ModelFiles, config: WorkerConfig, role: Callable[[], str]
) -> LoopModel:
    """`role` is asked at each step. Raises ConfigError for settings with which the KV would not stay as it is."""
    if config.device != "cpu":
        raise ConfigError("device", config.device, "cpu: a paced worker computes nothing")
    for field, value in (("kv_cache_dtype", "auto"), ("kv_wire_dtype", "native")):
        if getattr(config, field, value) != value:
            raise ConfigError(field, getattr(config, field), f"{value}: answers depend on every bit of the KV")
    assert files.config is not None  # a folder has one
    model = PacedModel(files.config.parent)
    factories = ModelFactories(runner=lambda kv: PacedRunner(model, kv, coefficients, role))
    return LoopModel.of(files, LoadedModel.of(lambda: model, files, config, factories), config)


class PacedWorker(WorkerProcess):
    """A worker at a pace, that of its present role."""

    def __init__(
        self, coefficients: Coefficients, home: DutyOffer[LoopModel], other: DutyOffer[LoopModel] | None
    ) -> None:
        def load(files: ModelFiles) -> LoopModel:
            return load_paced(coefficients, files, home.config, lambda: self.duties.role)

        super().__init__(replace(home, load=load), other)


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2 or argv[1] not in ROLES:
        raise SystemExit(f"usage: {PROGRAM} COEFFICIENTS {'|'.join(ROLES)} FLAGS")
    coefficients = Coefficients.read(Path(argv[0]))
    return run_role(argv[1], argv[2:], lambda home, other: PacedWorker(coefficients, home, other))


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
