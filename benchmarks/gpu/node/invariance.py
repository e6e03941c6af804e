"""With `--batch-invariant`: has a sequence the same logits, bit for bit, in every bucket, place and kind of step?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.model import random_model
from benchmarks.gpu.node.families import everywhere_triton
from benchmarks.gpu.node.verdict import Verdict
from benchmarks.gpu.shape import GPUShape
from common.engine.kv.cache import KVCache
from common.engine.models.batch import SequenceChunk
from common.engine.run.graph_runner import GraphRunner
from common.engine.run.recorded_steps import GraphRecorder, PlainRecorder, bucket_sizes
from common.engine.run.runner import ModelRunner

BLOCKS_EACH = 2


def invariance_rows(shape: GPUShape, device: torch.device, max_num_seqs: int) -> Iterator[dict[str, Any]]:
    """A row for prompts that share a step, and one for each bucket: how many sequences have other logits than alone."""
    with everywhere_triton():
        model = random_model(shape, device, batch_invariant=True)
        kv = KVCache(shape.config, BLOCKS_EACH * max_num_seqs, shape.block_size, shape.dtype, device)
        plain = ModelRunner(model, kv)
        recorder = GraphRecorder(device) if device.type == "cuda" else PlainRecorder()
        longest = BLOCKS_EACH * shape.block_size
        graphs = GraphRunner(model, kv, recorder, max_num_seqs=max_num_seqs, max_model_len=longest)
        length = shape.block_size + 3
        prompts = [prompt(i, length, shape) for i in range(max_num_seqs)]
        alone = torch.cat([plain.forward([one]) for one in prompts])
        together = plain.forward(prompts)
        yield {"step": "prompts together", "rows": max_num_seqs, "different": differing(together, alone)}
        rows = [SequenceChunk((i % shape.vocab_size,), length, prompts[i].block_table) for i in range(max_num_seqs)]
        alone = torch.cat([graphs.forward([one]).clone() for one in rows])
        for size in bucket_sizes(max_num_seqs):
            last = list(range(max_num_seqs))[: -size - 1 : -1]  # other places than their own
            found = graphs.forward([rows[i] for i in last])
            yield {"step": f"bucket of {size}", "rows": size, "different": differing(found, alone[last])}


def prompt(index: int, length: int, shape: GPUShape) -> SequenceChunk:
    tokens = [(7 * index + j) % shape.vocab_size for j in range(length)]
    return SequenceChunk(tokens, 0, range(BLOCKS_EACH * index, BLOCKS_EACH * (index + 1)))


def differing(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Rows that are not equal bit for bit."""
    return int((found != expected).any(1).sum())


def of_invariance(row: dict[str, Any]) -> Verdict:
    found = f"{row['different']} of {row['rows']} sequences have other logits than alone"
    return Verdict("invariance", row["step"], row["different"] == 0, found, "none, bit for bit")
