"""A model that takes the time that coefficients say, and computes next to nothing: for clusters larger than a machine.

Each token's KV is a running sum over all tokens before it, and the next token is a hash of that sum. So an answer
depends on every token before it and on every block that was cached or transferred, and one that is wrong shows. Tokens
are printable ASCII, of the tiny model's byte tokenizer.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.paced.coefficients import StepCoefficients
from common.errors import ModelError
from common.kv.cache import KVCache
from common.latency.step_model import StepShape
from common.model.batch import ForwardBatch, SequenceChunk, check_chunk
from common.model_files.config import ModelConfig, from_hf
from common.model_files.tiny import make_tiny_model
from common.runner.runner import ModelRunner
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
