"""Recorded decode steps beside the same steps kernel by kernel, in every bucket, full and padded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.engine import LOGIT_TOLERANCE
from benchmarks.gpu.model import random_model
from benchmarks.gpu.node.verdict import Verdict
from benchmarks.gpu.shape import GPUShape
from common.engine.kv.cache import KVCache
from common.engine.models.batch import SequenceChunk
from common.engine.run.graph_runner import GraphRunner
from common.engine.run.recorded_steps import GraphRecorder, PlainRecorder, bucket_sizes
from common.engine.run.runner import ModelRunner


def bucket_rows(shape: GPUShape, device: torch.device, max_num_seqs: int) -> Iterator[dict[str, Any]]:
    """One row for each bucket: the share of their norm by which the logits differ, and how many tokens do.

    A full bucket runs the products of the same sizes as the plain step, so its logits should be equal bit for bit.
    """
    model = random_model(shape, device)
    length = shape.block_size + 3
    kv = KVCache(shape.config, 2 * max_num_seqs, shape.block_size, shape.dtype, device)
    plain = ModelRunner(model, kv)
    recorder = GraphRecorder(device) if device.type == "cuda" else PlainRecorder()
    graphs = GraphRunner(model, kv, recorder, max_num_seqs=max_num_seqs, max_model_len=2 * shape.block_size)
    for i in range(max_num_seqs):
        tokens = [(7 * i + j) % shape.vocab_size for j in range(length)]
        plain.forward([SequenceChunk(tokens, 0, (2 * i, 2 * i + 1), sample=False)])
    before = 0
    for size in bucket_sizes(max_num_seqs):
        row: dict[str, Any] = {"bucket": size}
        for how, count in {"padded": before + 1, "full": size}.items():
            chunks = [SequenceChunk((i % shape.vocab_size,), length, (2 * i, 2 * i + 1)) for i in range(count)]
            expected = plain.forward(chunks).clone()
            found = graphs.forward(chunks)
            error = float((found - expected).norm() / expected.norm())
            different = int((found.argmax(-1) != expected.argmax(-1)).sum())
            row |= {f"{how}_rows": count, f"{how}_error": error, f"{how}_other_tokens": different}
        before = size
        yield row


def of_bucket(row: dict[str, Any], dtype: torch.dtype) -> Verdict:
    tolerance = LOGIT_TOLERANCE[dtype]
    worst = max(row["padded_error"], row["full_error"])
    equal = "bit for bit when full" if row["full_error"] == 0.0 else "not bit for bit"
    found = f"logits off by {worst:.2g} of their norm, {equal}"
    what = f"{row['bucket']} rows, and {row['padded_rows']} padded"
    return Verdict("graphs", what, worst < tolerance, found, f"less than {tolerance:g}")
