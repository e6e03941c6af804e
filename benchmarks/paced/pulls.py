"""TTFT of bursts with one beginning, with pulls between prefill workers and without, at a pace of one's own.

A cluster of paced workers (`benchmarks.paced`): real processes, messages and KV bytes, whose steps wait as long as
coefficients say. Each burst begins with one request, which leaves its prefix on one prefill worker; once the router has
heard of that, the others come at once. Without pulls those that do not wait for that worker compute the prefix again.
Answers are checked: they depend on every block.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.progress import Progress

from benchmarks.load.report import open_console, print_table
from benchmarks.load.summary import percentile
from benchmarks.paced.coefficients import StepCoefficients
from benchmarks.paced.model import Coefficients, answer
from benchmarks.paced.stack import PacedStack
from benchmarks.script import in_turns, median_ratio, run, script_parser, write_result
from benchmarks.stack import Stack, StackSettings

PROGRAM: Final = "python -m benchmarks.paced.pulls"
WITH, WITHOUT = "with pulls", "without"
ARMS = (WITHOUT, WITH)
REPORTED_S = 1.0
"""By then routers have heard what the first request left."""


async def first_token(client: httpx.AsyncClient, prompt: Sequence[int]) -> tuple[float, list[int]]:
    """TTFT in ms of a request for one token, and that. Raises RuntimeError for an error."""
    body = {"prompt": list(prompt), "max_tokens": 1, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    began = time.monotonic()
    reply = await client.post("/v1/completions", json=body)
    took_ms = 1000 * (time.monotonic() - began)
    if reply.status_code != 200:
        raise RuntimeError(f"{reply.status_code} {reply.text[:300]}")
    return took_ms, list(reply.json()["choices"][0]["token_ids"])


class Bench:
    """`options` are the script's."""

    def __init__(self, options: Namespace) -> None:
        self._options = options
        pace = StepCoefficients(fixed_s=0.004, token_s=1 / options.tokens_per_s)
        self._pace = Coefficients(prefill=pace, decode=pace, kv_bytes=options.kv_bytes)

    def measure(self, arm: str, number: int, step: Any) -> dict[str, Any]:
        """TTFT in ms of the bursts' later requests, and where their tokens came from."""
        options = self._options
        with tempfile.TemporaryDirectory(prefix="diptych-pulls-") as folder:
            file = Path(folder) / "pace.json"
            file.write_bytes(msgspec.json.encode(self._pace))
            with PacedStack(
                StackSettings(
                    options.prefill,
                    1,
                    worker_flags=(
                        *("--kv-memory-gib", str(options.kv_memory_gib), "--kv-transport", options.kv_transport),
                        *(() if arm == WITH else ("--no-pull-prefixes",)),
                    ),
                    router_flags=("--local-prefill-threshold", "0"),
                    log_dir=options.log_dir,
                ),
                coefficients=file,
            ) as stack:
                found = asyncio.run(self._bursts(stack, options.seed + number, step))
                return {"ttft_ms": found, **tokens_of(stack)}

    async def _bursts(self, stack: Stack, seed: int, step: Any) -> list[float]:
        options, source = self._options, random.Random(seed)

        def tokens(count: int) -> list[int]:
            return [source.randrange(256) for _ in range(count)]

        found: list[float] = []
        async with httpx.AsyncClient(base_url=stack.url, timeout=300.0, trust_env=False) as client:
            for _ in range(2 * options.prefill):  # every worker learns its pace
                await asyncio.gather(*(first_token(client, tokens(256)) for _ in range(options.prefill)))
            for _ in range(options.bursts):
                prefix = tokens(options.prefix)
                await first_token(client, prefix)
                await asyncio.sleep(REPORTED_S)
                prompts = [[*prefix, *tokens(options.own)] for _ in range(options.burst)]
                heard = await asyncio.gather(*(first_token(client, prompt) for prompt in prompts))
                if [token for _, token in heard] != [answer(prompt, 1) for prompt in prompts]:
                    raise RuntimeError("an answer is wrong: its KV must have been")
                found += [took_ms for took_ms, _ in heard]
                step()
        return [round(value, 2) for value in found]


def tokens_of(stack: Stack) -> dict[str, float]:
    """Prompt tokens of the prefill workers, by where they came from."""
    found: dict[str, float] = {}
    for worker in stack.workers("prefill"):
        text = httpx.get(f"{worker.http_url}/metrics", timeout=10.0, trust_env=False).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "diptych_prefix_hit_tokens_total":
                    found[sample.labels["tier"]] = found.get(sample.labels["tier"], 0.0) + sample.value
                elif sample.name == "diptych_prompt_tokens_computed_total":
                    found["computed"] = found.get("computed", 0.0) + sample.value
    return found


def parse(argv: Sequence[str]) -> Namespace:
    parser = script_parser(PROGRAM, __doc__)
    parser.add_argument("--prefill", type=int, default=2, help="prefill workers")
    parser.add_argument("--prefix", type=int, default=2048, help="tokens that a burst shares")
    parser.add_argument("--own", type=int, default=64, help="tokens of each request behind them")
    parser.add_argument("--burst", type=int, default=4, help="requests that come at once")
    parser.add_argument("--bursts", type=int, default=20)
    parser.add_argument("--tokens-per-s", type=float, default=8000.0, help="pace of a prefill worker")
    parser.add_argument("--kv-bytes", type=int, default=16384, help="of a token")
    parser.add_argument("--kv-memory-gib", type=float, default=1.0, help="of each worker")
    parser.add_argument("--kv-transport", default="auto", help="auto, tcp or shm")
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--log-dir", type=Path, help="keep the processes' logs here")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    bench = Bench(options)
    rounds: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    with Progress() as progress:
        bar = progress.add_task("bursts", total=options.repeats * len(ARMS) * options.bursts)
        for number in range(options.repeats):
            for arm in in_turns(ARMS, number):
                rounds[arm].append(bench.measure(arm, number, lambda: progress.advance(bar)))
    medians = {arm: [statistics.median(each["ttft_ms"]) for each in found] for arm, found in rounds.items()}
    rows, shown = [], []
    for arm, found in rounds.items():
        samples = sorted(value for each in found for value in each["ttft_ms"])
        row = {"arm": arm, **{f"p{q}_ms": round(percentile(samples, q), 2) for q in (50, 99)}}
        row["ratio_p50"] = median_ratio(medians[arm], medians[WITHOUT])
        sources = {name: sum(each.get(name, 0.0) for each in found) for name in ("memory", "peer", "computed")}
        rows.append(row | sources)
        shown.append(tuple(str(value) for value in (row | sources).values()))
    print_table(open_console(), "TTFT of bursts, and prompt tokens by source", tuple(rows[0]), shown)
    write_result(options, PROGRAM, argv, {"rows": rows, "rounds": rounds})
    return 0


if __name__ == "__main__":
    run(main)
