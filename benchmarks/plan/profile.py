"""Profiles a prefill and a decode worker on this machine: starts both, loads them, and takes the models of their steps.

The workers compute in turns, so that neither takes cores from the other: with every prompt computed on the decode
worker, only requests for a single token go to the prefill worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.load.client import CompletionClient, RequestOptions, ServerError, ask_server, ask_token_ids
from benchmarks.load.load import Load
from benchmarks.load.workload import LengthRange, Vocabulary, Workload
from benchmarks.plan.running import FEWEST_STEPS, ask_load, kinds_in
from benchmarks.stack import Stack, StackSettings
from common.errors import ConfigError

EVERY_PROMPT = 1_000_000
LONGEST = 4096
"""Prompts are of up to so many tokens, or a half of what the model takes."""
ANSWER = 32
POLL_S = 0.5
"""Within so long a router hears of the last steps: two heartbeats."""
SHARES = (0.02, 0.06, 0.12, 0.25, 0.5, 1.0)
"""Of the longest prompt: the lengths of prompts."""
LONGEST_SHARE = 0.1
"""A phase is left out when its prompts would take more of the whole time than this: the fit knows shorter ones."""
BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Phase:
    """So many requests at once, all of these lengths, for at most `seconds`; an answer of one token is prefill's."""

    concurrency: int
    input_len: int
    output_len: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """Flags of both workers, and about how long they are driven, start not included."""

    model: str
    dtype: str = "auto"
    quantization: str = "auto"
    kv_memory_gib: float = 1.0
    seconds: float = 120.0


def prompt_phases(longest: int, seconds: float) -> list[Phase]:
    """Prompts of several lengths for the prefill worker, the shortest first, in two fifths of the time."""
    lengths = _lengths(longest)
    return [Phase(num, length, 1, 0.2 * seconds / len(lengths)) for length in lengths for num in (1, 3)]


def batch_phases(longest: int, most_seqs: int, seconds: float) -> list[Phase]:
    """Batches of several sizes and contexts for the decode worker, in the rest of the time."""
    lengths = _lengths(longest)
    contexts = (lengths[0], lengths[len(lengths) // 2], lengths[-1])
    runs = [(size, length) for size in BATCHES if size <= most_seqs for length in contexts]
    return [Phase(size, length, ANSWER, 0.6 * seconds / len(runs)) for size, length in runs]


def _lengths(longest: int) -> list[int]:
    return sorted({max(2, round(share * longest)) for share in SHARES})


def profile(options: ProfileOptions, advance: Callable[[float, str], None]) -> dict[str, Any]:
    """The plan's `prefill`, `decode` and `model`, as a file would have them.

    `advance` hears the seconds of each phase once it is over, and a few words. Raises StackError when the workers do
    not start, ServerError and ConfigError when they do not answer or learn nothing.
    """
    worker_flags = ("--kv-memory-gib", f"{options.kv_memory_gib:g}", "--no-enable-prefix-caching")
    stack = Stack(
        StackSettings(
            model=options.model,
            dtype=options.dtype,
            quantization=options.quantization,
            worker_flags=worker_flags,
            router_flags=("--local-prefill-threshold", str(EVERY_PROMPT)),
            tied=True,
        )
    )
    with stack, httpx.Client(base_url=stack.url, timeout=10.0, trust_env=False) as asking:
        server = ask_server(asking, "")
        token_ids = ask_token_ids(asking, server.model)
        max_model_len = server.max_model_len or LONGEST
        workers = ask_load(stack.url)["workers"]
        most_seqs = max(int(worker["max_num_seqs"]) for worker in workers if worker["role"] == "decode")
        longest = min(LONGEST, max_model_len // 2)
        limit_s, token_s = LONGEST_SHARE * options.seconds, 0.0
        prompts = prompt_phases(longest, options.seconds)
        batches = batch_phases(longest, most_seqs, options.seconds)
        for phase in (*prompts, *batches):
            if phase.concurrency * phase.input_len * token_s <= limit_s:
                found_s = asyncio.run(drive(stack.url, server.model, token_ids, phase))
                token_s = found_s if phase.output_len == 1 else token_s
            advance(phase.seconds, f"{phase.concurrency} x {phase.input_len}/{phase.output_len} tokens")
        deadline = time.monotonic() + options.seconds
        for role, phase in (("prefill", prompts[0]), ("decode", batches[0])):
            while num_steps(stack.url, role) < FEWEST_STEPS and time.monotonic() < deadline:
                asyncio.run(drive(stack.url, server.model, token_ids, phase))
                advance(0.0, f"more steps of the {role} worker")
        found = _learned(stack.url, options)
    block_size = found.setdefault("model", {}).get("block_size", 16)
    num_blocks = found["decode"]["num_blocks"]
    found["model"] |= {
        "kv_bytes_per_token": max(1, round(options.kv_memory_gib * 2**30 / num_blocks / block_size)),
        "max_model_len": max_model_len,
    }
    return found


async def drive(
    url: str, model: str, token_ids: tuple[int, ...], phase: Phase, api_key: str = "", limit_s: float | None = None
) -> float:
    """Return the seconds for each prompt token. Requests that are unfinished after `limit_s` seconds are cancelled.

    Raises ServerError when no request succeeds.
    """
    client = CompletionClient(url, RequestOptions(model), api_key=api_key)
    input_len, output_len = (LengthRange(length, length) for length in (phase.input_len, phase.output_len))
    seed = phase.concurrency * 100_003 + phase.input_len
    workload = Workload(Vocabulary(token_ids), input_len, output_len, seed=seed)
    load = Load(client, workload, duration_s=phase.seconds)
    began_at = time.monotonic()
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await load.closed_loop(phase.concurrency)
    finally:
        await client.close()
    num_ok = sum(record.ok for record in load.records)
    if not num_ok:
        message = load.records[-1].message if load.records else ""
        reason = message or f"no complete answer within {time.monotonic() - began_at:.1f} s"
        raise ServerError(f"no request of {phase.input_len} tokens succeeded: {reason}")
    return (time.monotonic() - began_at) / (num_ok * phase.input_len)


def num_steps(url: str, role: str, api_key: str = "") -> int:
    """Steps that the worker of a role has fitted its model to, once the router has heard of the last of them."""
    time.sleep(POLL_S)
    models = [worker["step_model"] for worker in ask_load(url, api_key)["workers"] if worker["role"] == role]
    return max((int(model["num_steps"]) for model in models), default=0)


def _learned(url: str, options: ProfileOptions) -> dict[str, Any]:
    """What the router says of both workers. Raises ConfigError when one has computed too few steps."""
    for role in ("prefill", "decode"):
        if (num := num_steps(url, role)) < FEWEST_STEPS:
            allowed = f"long enough for {FEWEST_STEPS} steps of each worker; the {role} worker computed {num}"
            raise ConfigError("profile_s", options.seconds, allowed)
    return kinds_in(ask_load(url), url)
