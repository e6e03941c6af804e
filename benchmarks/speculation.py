"""The gain of speculative decoding (`--max-draft-tokens`): time per token of answers that copy much, and of others.

Stacks run side by side: one that drafts nothing, one that drafts from the text, and with `--draft-model` one that has
such a model, too. Each request goes to all in turns, one at a time. Then requests of all kinds run together, several in
flight. The answers of all stacks must be the same.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console
from rich.progress import Progress

from benchmarks.arms import scrape, stack_parser
from benchmarks.load import workload
from benchmarks.load.report import open_console, print_table
from benchmarks.script import in_turns, median_ratio, run, write_result
from benchmarks.stack import Stack, StackSettings

PROGRAM: Final = "python -m benchmarks.speculation"
PLAIN, DRAFTING, MODEL = "plain", "drafting", "draft model"
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
    """A kind of request; its answer must match `schema`, if there is one."""

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
    """`decode_s` is from the first piece of text to the last."""

    text: str
    num_tokens: int
    decode_s: float

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
        Task("random", " ".join(random.Random(1).choices(sorted({*passage.split()}), k=150))),
        Task("summary", f"Summarise this text in a few sentences:\n\n{passage[:2400]}"),
    ]


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """Send one request and read its answer. Raises RuntimeError when the service refuses or fails."""
    pieces: list[str] = []
    first = last = 0.0
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
    return Answer("".join(pieces), num_tokens, last - first)


def counts(stack: Stack) -> tuple[float, float]:
    """The numbers of tokens drafted and accepted since the start."""
    found = scrape(stack.workers("decode")[0])
    return found["vllm:spec_decode_num_draft_tokens_total"], found["vllm:spec_decode_num_accepted_tokens_total"]


async def one_by_one(
    stacks: dict[str, Stack], clients: dict[str, httpx.AsyncClient], repeats: int, max_tokens: int
) -> list[dict[str, Any]]:
    """A row for each kind, temperature and stack that drafts; the first round of each warms up and does not count."""
    rows: list[dict[str, Any]] = []
    with Progress() as progress:
        bar = progress.add_task("one at a time", total=len(TEMPERATURES) * len(tasks()) * len(stacks) * (repeats + 1))
        for temperature in TEMPERATURES:
            for task in tasks():
                found: dict[str, list[Answer]] = {name: [] for name in stacks}
                arms = [name for name in stacks if name != PLAIN]
                before = {name: counts(stacks[name]) for name in arms}
                for repeat in range(repeats + 1):
                    body = task.body(stacks[PLAIN].model, temperature, repeat, max_tokens)
                    for name in in_turns(tuple(stacks), repeat):
                        found[name].append(await ask(clients[name], body))
                        progress.advance(bar)
                for arm in arms:
                    drafted, accepted = (now - then for now, then in zip(counts(stacks[arm]), before[arm], strict=True))
                    row = {"task": task.name, "temperature": temperature, "arm": arm}
                    rows.append(row | _compared(found[PLAIN], found[arm]) | {"drafted": drafted, "accepted": accepted})
    return rows


def _compared(plain: Sequence[Answer], drafting: Sequence[Answer]) -> dict[str, Any]:
    """The same requests to two stacks, in the same order."""
    times, others = ([answer.tpot_ms for answer in answers[1:]] for answers in (plain, drafting))
    return {
        "output_tokens": statistics.mean(answer.num_tokens for answer in plain),
        "tpot_plain_ms": round(statistics.median(times), 3),
        "tpot_drafting_ms": round(statistics.median(others), 3),
        "ratio": median_ratio(times, others),
        "same": sum(a.text == b.text for a, b in zip(plain, drafting, strict=True)),
        "answers": len(plain),
    }


def _bodies(model: str, max_tokens: int) -> Iterator[dict[str, Any]]:
    seed = 0
    while True:
        for task in tasks():
            seed += 1
            yield task.body(model, TEMPERATURES[seed // 2 % 2], seed, max_tokens)


async def side_by_side(
    stacks: dict[str, Stack], clients: dict[str, httpx.AsyncClient], in_flight: int, repeats: int, max_tokens: int
) -> list[dict[str, Any]]:
    """`in_flight` requests of all kinds at once, repeatedly: output tokens a second, and the mean time of a token."""
    bodies = list(islice(_bodies(stacks[PLAIN].model, max_tokens), in_flight))
    rates: dict[str, list[float]] = {name: [] for name in stacks}
    tpots: dict[str, list[float]] = {name: [] for name in stacks}
    texts: dict[str, list[str]] = {}
    for repeat in range(repeats + 1):
        for name in in_turns(tuple(stacks), repeat):
            began = time.perf_counter()
            answers = await asyncio.gather(*(ask(clients[name], body) for body in bodies))
            rates[name].append(sum(answer.num_tokens for answer in answers) / (time.perf_counter() - began))
            tpots[name].append(statistics.mean(answer.tpot_ms for answer in answers))
            texts[name] = [answer.text for answer in answers]
    return [
        {
            "in_flight": in_flight,
            "arm": arm,
            "plain_tokens_per_s": round(statistics.median(rates[PLAIN][1:]), 1),
            "drafting_tokens_per_s": round(statistics.median(rates[arm][1:]), 1),
            "tpot_plain_ms": round(statistics.median(tpots[PLAIN][1:]), 3),
            "tpot_drafting_ms": round(statistics.median(tpots[arm][1:]), 3),
            "ratio": median_ratio(tpots[PLAIN][1:], tpots[arm][1:]),
            "same": sum(one == other for one, other in zip(texts[PLAIN], texts[arm], strict=True)),
            "answers": in_flight,
        }
        for arm in stacks
        if arm != PLAIN
    ]


async def measure(
    stacks: dict[str, Stack], repeats: int, max_tokens: int, loads: Sequence[int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    clients = {
        name: httpx.AsyncClient(base_url=stack.url, timeout=TIMEOUT_S, trust_env=False)
        for name, stack in stacks.items()
    }
    rows = await one_by_one(stacks, clients, repeats, max_tokens)
    together: list[dict[str, Any]] = []
    for in_flight in loads:
        together += await side_by_side(stacks, clients, in_flight, repeats, max_tokens)
    for client in clients.values():
        await client.aclose()
    return rows, together


def print_rows(console: Console, rows: Sequence[dict[str, Any]], together: Sequence[dict[str, Any]]) -> None:
    shown: list[tuple[str, ...]] = []
    for row in rows:
        share = f"{row['accepted'] / row['drafted']:.0%}" if row["drafted"] else "-"
        drafts = (f"{row['drafted']:.0f}", share)
        shown.append((row["task"], f"{row['temperature']:g}", row["arm"], *_times(row), *drafts, _same(row)))
    columns = ("task", "temperature", "drafts", "TPOT, ms", "drafting", "faster", "drafted", "accepted", "same answers")
    print_table(console, "one at a time, medians", columns, shown)
    cells = [(str(row["in_flight"]), row["arm"], *_rates(row), *_times(row), _same(row)) for row in together]
    names = ("in flight", "drafts", "output tok/s", "drafting", "TPOT, ms", "drafting", "faster", "same answers")
    print_table(console, "all kinds together", names, cells, left=())


def _rates(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['plain_tokens_per_s']:.0f}", f"{row['drafting_tokens_per_s']:.0f}"


def _times(row: dict[str, Any]) -> tuple[str, str, str]:
    return f"{row['tpot_plain_ms']:.2f}", f"{row['tpot_drafting_ms']:.2f}", f"{row['ratio']:.2f}x"


def _same(row: dict[str, Any]) -> str:
    return f"{row['same']} of {row['answers']}"


def parse(argv: Sequence[str]) -> Namespace:
    parser = stack_parser(PROGRAM, __doc__)
    parser.add_argument("--quantization", default="auto", help="of the weights")
    parser.add_argument("--threads", type=int, default=2, help="of each worker")
    parser.add_argument("--draft-tokens", type=int, default=6, help="most draft tokens of an answer in one step")
    parser.add_argument("--draft-model", default="", help="a smaller model of the same vocabulary")
    parser.add_argument("--draft-quantization", default="auto", help="of its weights")
    parser.add_argument("--repeats", type=int, default=5, help="counted requests of each kind")
    parser.add_argument("--max-tokens", type=int, default=200, help="of an answer")
    parser.add_argument("--in-flight", default="4,8,16", help="requests at once, one row for each number")
    return parser.parse_args(argv)


def stack_of(options: Namespace, name: str) -> Stack:
    draft_tokens = 0 if name == PLAIN else options.draft_tokens
    model = ("--draft-model", options.draft_model, "--draft-quantization", options.draft_quantization)
    return Stack(
        StackSettings(
            model=options.model,
            dtype=options.dtype,
            quantization=options.quantization,
            worker_flags=("--threads", str(options.threads), "--block-size", str(options.block_size)),
            decode_flags=("--max-draft-tokens", str(draft_tokens), *(model if name == MODEL else ())),
            log_dir=options.log_dir / name.replace(" ", "-") if options.log_dir else None,
        )
    )


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    loads = [int(number) for number in options.in_flight.split(",") if number]
    arms = (DRAFTING, PLAIN, *((MODEL,) if options.draft_model else ()))
    with ExitStack() as running:
        stacks = {name: running.enter_context(stack_of(options, name)) for name in arms}
        rows, together = asyncio.run(measure(stacks, options.repeats, options.max_tokens, loads))
    print_rows(open_console(), rows, together)
    names = ("model", "dtype", "quantization", "threads", "repeats", "draft_tokens", "max_tokens", "draft_model")
    more = {name: getattr(options, name) for name in names}
    write_result(options, PROGRAM, argv, {"one_by_one": rows, "together": together}, **more)
    return 0


if __name__ == "__main__":
    run(main)
