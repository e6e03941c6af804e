"""What drafting brings (`--max-draft-tokens`): time per token of answers that copy much, and of others.

Two stacks run side by side, one of which drafts; each request goes to both, one after the other, in turning order.
Then all kinds together, several in flight. The answers must be the same.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import workload
from benchmarks.arms import scrape, script_parser
from benchmarks.conditions import conditions
from benchmarks.report import open_console, write_json
from benchmarks.stack import Stack
from benchmarks.time_limit import time_limit

PROGRAM: Final = "python -m benchmarks.speculation"
PLAIN, DRAFTING = "plain", "drafting"
TEMPERATURES: Final = (0.0, 0.7)
TIMEOUT_S: Final = 600.0
PLACES: Final = {
    "type": "object",
    "properties": {
        "observations": {
            "type": "array",
            "minItems": 3,
            "maxItems": 5,
            "items": {
                "type": "object",
                "properties": {
                    "who_observed": {"enum": ["engineers", "pilots", "others"]},
                    "what_was_observed": {"type": "string", "maxLength": 60},
                    "certainty_in_percent": {"type": "integer", "minimum": 0, "maximum": 100},
                },
                "required": ["who_observed", "what_was_observed", "certainty_in_percent"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["observations"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Task:
    """A kind of request; `schema` is what its answer must match."""

    name: str
    text: str
    schema: dict[str, Any] | None = None

    def body(self, model: str, temperature: float, seed: int, max_tokens: int) -> dict[str, Any]:
        schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.schema}}
        return {
            "model": model,
            "messages": [{"role": "user", "content": self.text}],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"response_format": schema} if self.schema else {}),
        }


@dataclass(frozen=True)
class Answer:
    """Seconds from the first piece of text to the last, and of the whole request."""

    text: str
    num_tokens: int
    decode_s: float
    total_s: float

    @property
    def tpot_ms(self) -> float:
        return self.decode_s * 1000 / max(1, self.num_tokens - 1)


def tasks() -> list[Task]:
    passage = (Path(__file__).parent / "data" / "passage.txt").read_text()
    code = inspect.getsource(workload)[:1800]
    return [
        Task("chat", "Explain to a curious child why the sky is blue."),
        Task("quote", f"Repeat this text word for word:\n\n{passage[:900]}"),
        Task("story", "Write a short story about a lighthouse keeper who finds a letter in a bottle."),
        Task("json", f"What was observed, and by whom?\n\n{passage[:1200]}", PLACES),
        Task("list", "List ten tips for a healthy life, one line each."),
        Task("code", f"Write this Python code again, with seed renamed to origin, and nothing else:\n\n{code}"),
        Task("summary", f"Summarise this text in a few sentences:\n\n{passage[:2400]}"),
    ]


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """Raises RuntimeError when the service refuses or fails."""
    pieces: list[str] = []
    began = first = last = time.perf_counter()
    num_tokens = 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                if response.status_code != 200:
                    raise RuntimeError(f"status {response.status_code}: {line[:200]}")
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(f"the answer broke off: {event['error']}")
            content = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            if content:
                last = time.perf_counter()
                first = last if not pieces else first
                pieces.append(content)
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    return Answer("".join(pieces), num_tokens, last - first, time.perf_counter() - began)


def counts(stack: Stack) -> tuple[float, float]:
    """Tokens drafted so far, and those that were accepted."""
    found = scrape(stack.workers("decode")[0])
    return found["vllm:spec_decode_num_draft_tokens_total"], found["vllm:spec_decode_num_accepted_tokens_total"]


async def one_by_one(
    stacks: dict[str, Stack], clients: dict[str, httpx.AsyncClient], repeats: int, max_tokens: int
) -> list[dict[str, Any]]:
    """A row for each kind and temperature; the first round of each warms up caches and is not counted."""
    rows: list[dict[str, Any]] = []
    with Progress() as progress:
        bar = progress.add_task("one at a time", total=len(TEMPERATURES) * len(tasks()) * 2 * (repeats + 1))
        for temperature in TEMPERATURES:
            for task in tasks():
                found: dict[str, list[Answer]] = {name: [] for name in stacks}
                before = counts(stacks[DRAFTING])
                for repeat in range(repeats + 1):
                    body = task.body(stacks[PLAIN].model, temperature, repeat, max_tokens)
                    for name in sorted(stacks, reverse=bool(repeat % 2)):
                        found[name].append(await ask(clients[name], body))
                        progress.advance(bar)
                drafted, accepted = (now - then for now, then in zip(counts(stacks[DRAFTING]), before, strict=True))
                plain, drafting = ([answer.tpot_ms for answer in found[name][1:]] for name in (PLAIN, DRAFTING))
                rows.append(
                    {
                        "task": task.name,
                        "temperature": temperature,
                        "output_tokens": statistics.mean(answer.num_tokens for answer in found[PLAIN]),
                        "tpot_plain_ms": round(statistics.median(plain), 3),
                        "tpot_drafting_ms": round(statistics.median(drafting), 3),
                        "ratio": _ratio(plain, drafting),
                        "drafted": drafted,
                        "accepted": accepted,
                        "same": sum(a.text == b.text for a, b in zip(found[PLAIN], found[DRAFTING], strict=True)),
                        "answers": repeats + 1,
                    }
                )
    return rows


def _ratio(plain: Sequence[float], drafting: Sequence[float]) -> float:
    """Median of each round's own. A short answer that came in one piece has no time per token; 0 if all of them did."""
    ratios = [slow / fast for slow, fast in zip(plain, drafting, strict=True) if slow and fast]
    return round(statistics.median(ratios), 3) if ratios else 0.0


def _bodies(model: str, max_tokens: int) -> Iterator[dict[str, Any]]:
    seed = 0
    while True:
        for task in tasks():
            seed += 1
            yield task.body(model, TEMPERATURES[seed // 2 % 2], seed, max_tokens)


async def side_by_side(
    stacks: dict[str, Stack], clients: dict[str, httpx.AsyncClient], in_flight: int, repeats: int, max_tokens: int
) -> dict[str, Any]:
    """`in_flight` requests of all kinds at once, then again: output tokens a second, and the mean time of a token."""
    bodies = list(islice(_bodies(stacks[PLAIN].model, max_tokens), in_flight))
    rates: dict[str, list[float]] = {name: [] for name in stacks}
    tpots: dict[str, list[float]] = {name: [] for name in stacks}
    texts: dict[str, list[str]] = {}
    for repeat in range(repeats + 1):
        for name in sorted(stacks, reverse=bool(repeat % 2)):
            began = time.perf_counter()
            answers = await asyncio.gather(*(ask(clients[name], body) for body in bodies))
            rates[name].append(sum(answer.num_tokens for answer in answers) / (time.perf_counter() - began))
            tpots[name].append(statistics.mean(answer.tpot_ms for answer in answers))
            texts[name] = [answer.text for answer in answers]
    return {
        "in_flight": in_flight,
        "plain_tokens_per_s": round(statistics.median(rates[PLAIN][1:]), 1),
        "drafting_tokens_per_s": round(statistics.median(rates[DRAFTING][1:]), 1),
        "tpot_plain_ms": round(statistics.median(tpots[PLAIN][1:]), 3),
        "tpot_drafting_ms": round(statistics.median(tpots[DRAFTING][1:]), 3),
        "ratio": _ratio(tpots[PLAIN][1:], tpots[DRAFTING][1:]),
        "same": sum(one == other for one, other in zip(texts[PLAIN], texts[DRAFTING], strict=True)),
        "answers": in_flight,
    }


async def measure(
    stacks: dict[str, Stack], repeats: int, max_tokens: int, loads: Sequence[int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    clients = {
        name: httpx.AsyncClient(base_url=stack.url, timeout=TIMEOUT_S, trust_env=False)
        for name, stack in stacks.items()
    }
    rows = await one_by_one(stacks, clients, repeats, max_tokens)
    together = [await side_by_side(stacks, clients, in_flight, repeats, max_tokens) for in_flight in loads]
    for client in clients.values():
        await client.aclose()
    return rows, together


def print_rows(console: Console, rows: Sequence[dict[str, Any]], together: Sequence[dict[str, Any]]) -> None:
    table = Table(title="one at a time, medians", title_justify="left")
    for name in ("task", "temperature", "TPOT, ms", "drafting", "faster", "drafted", "accepted", "same answers"):
        table.add_column(name, justify="left" if name == "task" else "right")
    for row in rows:
        share = f"{row['accepted'] / row['drafted']:.0%}" if row["drafted"] else "-"
        times = (f"{row['tpot_plain_ms']:.2f}", f"{row['tpot_drafting_ms']:.2f}", f"{row['ratio']:.2f}x")
        same = f"{row['same']} of {row['answers']}"
        table.add_row(row["task"], f"{row['temperature']:g}", *times, f"{row['drafted']:.0f}", share, same)
    console.print(table)
    table = Table(title="all kinds together", title_justify="left")
    for name in ("in flight", "output tok/s", "drafting", "TPOT, ms", "drafting", "faster", "same answers"):
        table.add_column(name, justify="right")
    for row in together:
        rates = (f"{row['plain_tokens_per_s']:.0f}", f"{row['drafting_tokens_per_s']:.0f}")
        times = (f"{row['tpot_plain_ms']:.2f}", f"{row['tpot_drafting_ms']:.2f}", f"{row['ratio']:.2f}x")
        table.add_row(str(row["in_flight"]), *rates, *times, f"{row['same']} of {row['answers']}")
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = script_parser(PROGRAM, __doc__ or "")
    parser.add_argument("--quantization", default="auto", help="how weights are kept")
    parser.add_argument("--threads", type=int, default=2, help="of each worker")
    parser.add_argument("--draft-tokens", type=int, default=6, help="drafted for an answer at most")
    parser.add_argument("--repeats", type=int, default=5, help="counted requests of each kind")
    parser.add_argument("--max-tokens", type=int, default=200, help="of an answer")
    parser.add_argument("--in-flight", default="4,8,16", help="requests at once, for each of which there is a row")
    options = parser.parse_args(argv)
    loads = [int(number) for number in options.in_flight.split(",") if number]
    with ExitStack() as running:
        stacks = {
            name: running.enter_context(
                Stack(
                    model=options.model,
                    dtype=options.dtype,
                    quantization=options.quantization,
                    worker_flags=("--threads", str(options.threads), "--block-size", str(options.block_size)),
                    decode_flags=("--max-draft-tokens", str(draft_tokens)),
                    log_dir=options.log_dir / name if options.log_dir else None,
                )
            )
            for name, draft_tokens in ((PLAIN, 0), (DRAFTING, options.draft_tokens))
        }
        rows, together = asyncio.run(measure(stacks, options.repeats, options.max_tokens, loads))
    print_rows(open_console(), rows, together)
    if options.output:
        more = {name: getattr(options, name) for name in ("model", "dtype", "quantization", "threads", "repeats")}
        found = conditions(PROGRAM, argv, **more, draft_tokens=options.draft_tokens, max_tokens=options.max_tokens)
        write_json(options.output, {"conditions": found, "one_by_one": rows, "together": together})
    return 0


if __name__ == "__main__":
    with time_limit(0.0):  # told to end, it ends what it started
        raise SystemExit(main())
