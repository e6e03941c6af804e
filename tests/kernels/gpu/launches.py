"""Which kernels a model's steps would have compiled on a chip of capability 9.0: none is compiled, and none runs.

A program of its own, whose Triton does not interpret. Tensors are the CPU's, and what kernels should have written is
garbage. It prints, as JSON, the kernels of a worker's start, and those that only later steps asked for.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Literal, cast

os.environ.pop("TRITON_INTERPRET", None)

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from common.engine.kv.cache import KVCache
from common.engine.models.batch import SequenceChunk
from common.engine.models.load import load_model
from common.engine.run.graph_runner import GraphRunner
from common.engine.run.recorded_steps import PlainRecorder
from common.engine.run.runner import ModelRunner
from common.engine.run.warm_up import run_every_kind
from common.engine.sampling.sampler import Sampler, SamplingRow
from common.model_files.resolve import resolve_model
from common.model_files.tiny import make_tiny_model
from common.wire.sampling_params import SamplingParams
from kernels.backends import FOUND
from kernels.gpu import backend as triton_backend
from kernels.gpu import query_work

MAX_SEQS, SIZE, NUM_BLOCKS, MOST_TOKENS = 12, 16, 80, 600


class Pretended:
    """What Triton asks of a driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def steps(runner: ModelRunner, sampler: Sampler) -> None:
    """Of many sizes: prompts, prefixes, decoding batches, both together, and every way to sample."""
    table = range(NUM_BLOCKS)
    for length in (1, 2, 15, 16, 17, 100, 513):
        for start in (0, 1, 16, 600):
            runner.forward([SequenceChunk((0,) * length, start, table)])
    for count in (1, 2, 3, 8, 9, 12, 17, 40):
        for start in (0, 600):
            rows = [SequenceChunk((0,), start, table)] * count
            logits = runner.forward(rows)
            runner.forward([*rows, SequenceChunk((0, 0, 0), 0, table, sample=False)])
            for options in ({}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.1, "seed": 7}):
                params = SamplingParams(max_tokens=1, **cast(dict[str, Any], options))
                sampler.sample(logits, [SamplingRow(params, start + i) for i in range(count)])


def main(architecture: Literal["llama", "gemma3"], folder: Path, *, batch_invariant: bool) -> None:
    launched: set[tuple[str, str]] = set()

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        launched.add((fn.name.rpartition(".")[2], key))
        return True  # it need not be compiled

    driver.set_active(Pretended())
    query_work.LEAST_KEYS = 600  # so that chunks at the end of these short sequences are split
    knobs.runtime.jit_cache_hook = note
    FOUND["cpu"] = triton_backend
    files = resolve_model(str(make_tiny_model(folder / "model", architecture=architecture)))
    model = load_model(files, batch_invariant=batch_invariant)
    kv = KVCache(model.config, NUM_BLOCKS, SIZE, model.dtype)
    sampler, found = Sampler(model.config.vocab_size), {}
    for role in ("prefill", "decode"):
        launched.clear()
        plain = ModelRunner(model, kv)
        recorded = GraphRunner(model, kv, PlainRecorder(), max_num_seqs=MAX_SEQS, max_model_len=1280)
        if role == "prefill":
            launched.clear()  # it records nothing
        runner = plain if role == "prefill" else recorded
        runner.forward([SequenceChunk((0, 0), 0, (0,))])
        run_every_kind(runner, MOST_TOKENS)
        begin = set(launched)
        steps(runner, sampler)
        found[role] = {"begin": sorted(name for name, _ in begin), "later": sorted(n for n, _ in launched - begin)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(cast(Any, sys.argv[1]), Path(sys.argv[2]), batch_invariant="batch-invariant" in sys.argv)
