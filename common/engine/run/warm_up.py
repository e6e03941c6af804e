"""First steps of a worker: they compile kernels and ensure that the largest step fits, before requests arrive."""

from __future__ import annotations

from collections.abc import Callable

import torch

from common.config import WorkerConfig
from common.engine.kv import KVCache
from common.engine.models import SequenceChunk
from common.engine.run.memory_need import step_tokens
from common.engine.run.runner import ModelRunner
from common.engine.sampling import Sampler, SamplingRow, max_prompt_logprobs, token_logprobs
from common.errors import ConfigError
from common.wire import MAX_TOP_LOGPROBS, SamplingParams

TIMED_TOKENS = 16
"""Tokens of the timed step: enough that computing is significant compared with reading the weights."""
SMALL_CHUNK, SMALL_CHUNKS = 16, 32
"""Tokens of a chunk whose keys a GPU's attention splits, and the number of chunks that fill its split buffer."""
SAMPLED = (
    SamplingParams(max_tokens=1, temperature=0.0),
    SamplingParams(max_tokens=1, temperature=1.0),
    SamplingParams(max_tokens=1, temperature=1.0, top_p=0.5),
    SamplingParams(
        max_tokens=1,
        logit_bias=((0, 1.0),),
        repetition_penalty=1.1,
        presence_penalty=0.1,
        logprobs=MAX_TOP_LOGPROBS,
        allowed_token_ids=(0,),
    ),
)
"""Each kind of sampling that is compiled (greedy, plain, with a search), and one that needs the most memory."""


def warm_up_runner(make: Callable[[], ModelRunner], config: WorkerConfig, *, samples: bool = True) -> ModelRunner:
    """Create a runner and run its first steps on free blocks. `samples`: its model computes logits.

    On a CPU, the runner's profile is then that of a small step with the weights in memory. Raises ConfigError with the
    size of the cache if the largest step does not fit on the device.
    """
    num_tokens = step_tokens(config)
    try:
        runner = make()
        runner.forward([SequenceChunk((0, 0), 0, (0,))])
        if config.lora_places:  # an empty adapter
            runner.forward([SequenceChunk((0, 0), 0, (0,), adapter=0)])
        runner.forward([SequenceChunk((0,) * TIMED_TOKENS, 0, (0,))])
        if runner.kv.device.type == "cuda":
            run_every_kind(runner, num_tokens, max(1, config.places), samples=samples)
            runner.wait()
    except torch.OutOfMemoryError as error:
        field = "num_blocks" if config.num_blocks else "kv_memory_gib" if config.kv_gib else "gpu_memory_utilization"
        allowed = (
            f"lower: after weights and KV cache, a step of {num_tokens} tokens does not fit on {config.torch_device}"
        )
        raise ConfigError(field, getattr(config, field), f"{allowed} ({str(error).splitlines()[0]})") from error
    return runner


def run_every_kind(
    runner: ModelRunner, num_tokens: int, num_rows: int = 1, *, samples: bool = True, draws: bool = True
) -> None:
    """Run the largest step, a prompt with all logits, small chunks, `num_rows` rows at maximum length, and each draw.

    These chunks and rows need the largest split buffer, and sampling the rows the most memory of a draw. Without
    `draws`, runs the same steps on a rank whose peer has the logits and draws.
    """
    longest = min(runner.model.config.max_model_len, runner.kv.num_blocks * runner.kv.block_size)
    table = range(-(-longest // runner.kv.block_size))
    runner.forward(largest_step(num_tokens, longest, runner.kv))
    small = min(SMALL_CHUNK, longest, num_tokens)
    runner.forward([SequenceChunk((0,) * small, longest - small, table)] * min(SMALL_CHUNKS, num_tokens // small))
    if not samples:
        runner.forward([SequenceChunk((0,) * min(num_tokens, longest), 0, table, all_logits=True)])
        runner.forward([SequenceChunk((0,), longest - 1, table)] * num_rows)
        return
    num_logprobs_sent = min(num_tokens, longest, max_prompt_logprobs(runner.model.config.vocab_size))
    prompt_logits = runner.forward([SequenceChunk((0,) * num_logprobs_sent, 0, table, all_logits=True)])
    if draws:
        token_logprobs(prompt_logits, (0,) * num_logprobs_sent, MAX_TOP_LOGPROBS)
    del prompt_logits
    runner.forward([SequenceChunk((0,), longest - 1, table)])  # a single row uses other matrix products than many rows
    logits = runner.forward([SequenceChunk((0,), longest - 1, table)] * num_rows)
    sampler = Sampler(runner.model.config.vocab_size)
    for params in SAMPLED if draws else ():
        sampler.sample(logits, [SamplingRow(params, longest, (0,))] * num_rows)


def largest_step(num_tokens: int, longest: int, kv: KVCache) -> list[SequenceChunk]:
    """Return chunks of `num_tokens` in total, each of at most `longest` tokens, limited by the cache's blocks."""
    chunks: list[SequenceChunk] = []
    first = 0  # block
    while num_tokens > 0 and first < kv.num_blocks:
        count = min(num_tokens, longest, (kv.num_blocks - first) * kv.block_size)
        table = range(first, first + -(-count // kv.block_size))
        chunks.append(SequenceChunk((0,) * count, 0, table))
        num_tokens, first = num_tokens - count, table.stop
    return chunks
