"""A worker's first steps: they compile kernels and show that the largest step fits, before a client waits for one."""

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
"""Tokens of the timed step: so many that computing takes time beside reading the weights."""
SMALL_CHUNK, SMALL_CHUNKS = 16, 32
"""Tokens of a chunk whose keys a GPU's attention splits, and how many chunks take all the room that it has for that."""
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
"""One of each kind that sampling is compiled for: greedy, plain, and with a search. And one that needs most memory."""


def warmed_up(make: Callable[[], ModelRunner], config: WorkerConfig, *, samples: bool = True) -> ModelRunner:
    """Makes a runner and runs its first steps, on blocks that no sequence owns yet; `samples`: its model makes logits.

    On a CPU the runner's profile is then that of a small step with the weights in memory. Raises ConfigError with the
    size of the cache when the device has no memory left for the largest step.
    """
    num_tokens = step_tokens(config)
    try:
        runner = make()
        runner.forward([SequenceChunk((0, 0), 0, (0,))])
        if config.lora_places:  # what adapters add, of one that changes nothing yet
            runner.forward([SequenceChunk((0, 0), 0, (0,), adapter=0)])
        runner.forward([SequenceChunk((0,) * TIMED_TOKENS, 0, (0,))])
        if runner.kv.device.type == "cuda":
            run_every_kind(runner, num_tokens, max(1, config.places), samples=samples)
            runner.wait()
    except torch.OutOfMemoryError as error:
        field = "num_blocks" if config.num_blocks else "kv_memory_gib" if config.kv_gib else "gpu_memory_utilization"
        allowed = (
            f"less: after weights and KV cache, {config.torch_device} has no memory for a step of {num_tokens} tokens"
        )
        raise ConfigError(field, getattr(config, field), f"{allowed} ({str(error).splitlines()[0]})") from error
    return runner


def run_every_kind(
    runner: ModelRunner, num_tokens: int, num_rows: int = 1, *, samples: bool = True, draws: bool = True
) -> None:
    """Runs the largest step, one with a prompt's logits, small chunks and `num_rows` at the longest sequence's end, and
    each kind of draw.

    Without `draws` it runs the same steps beside a rank that has their logits, and so draws. Those chunks and rows need
    the most room that attention over splits may take, and sampling the rows the most that a step draws in.
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
    runner.forward([SequenceChunk((0,), longest - 1, table)])  # a lone row: its products are others than many rows'
    logits = runner.forward([SequenceChunk((0,), longest - 1, table)] * num_rows)
    sampler = Sampler(runner.model.config.vocab_size)
    for params in SAMPLED if draws else ():
        sampler.sample(logits, [SamplingRow(params, longest, (0,))] * num_rows)


def largest_step(num_tokens: int, longest: int, kv: KVCache) -> list[SequenceChunk]:
    """Chunks of `num_tokens` together, each of at most `longest`, or of as many as the cache has blocks for."""
    chunks: list[SequenceChunk] = []
    first = 0  # block
    while num_tokens > 0 and first < kv.num_blocks:
        count = min(num_tokens, longest, (kv.num_blocks - first) * kv.block_size)
        table = range(first, first + -(-count // kv.block_size))
        chunks.append(SequenceChunk((0,) * count, 0, table))
        num_tokens, first = num_tokens - count, table.stop
    return chunks
