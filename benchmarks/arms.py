"""The stacks that a measurement compares, and the options of scripts that start them."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.load.client import CompletionClient, RequestOptions, ask_server, ask_token_ids
from benchmarks.load.workload import LengthRange, Vocabulary, Workload
from benchmarks.script import script_parser
from benchmarks.stack import Stack, StackProcess, StackSettings


@dataclass(frozen=True)
class Arm:
    """One way to run the model. Cores pin the workers (empty: unpinned); router and load generator run anywhere."""

    name: str
    prefill: int
    prefill_threads: int = 1
    decode_threads: int = 1
    prefill_cores: tuple[int, ...] = ()
    decode_cores: tuple[int, ...] = ()
    decode_flags: tuple[str, ...] = ()

    def stack(self, model: str, dtype: str, worker_flags: Sequence[str] = (), log_dir: Path | None = None) -> Stack:
        """One decode worker, and one prefill worker that computes every prompt if the arm has one."""
        return Stack(
            StackSettings(
                prefill=self.prefill,
                decode=1,
                model=model,
                dtype=dtype,
                worker_flags=worker_flags,
                prefill_flags=("--threads", str(self.prefill_threads)),
                # Random prompts make answers that repeat themselves; draft tokens would hide the time of a step.
                decode_flags=("--threads", str(self.decode_threads), "--max-draft-tokens", "0", *self.decode_flags),
                router_flags=("--local-prefill-threshold", "0"),
                prefill_cores=self.prefill_cores,
                decode_cores=self.decode_cores,
                log_dir=log_dir / self.name.replace(" ", "-").replace(",", "") if log_dir else None,
            )
        )

    def describe(self) -> dict[str, Any]:
        """The arm as JSON values."""
        shown: dict[str, Any] = {
            "prefill_workers": self.prefill,
            "decode_workers": 1,
            "decode_threads": self.decode_threads,
            "decode_cores": list(self.decode_cores) or "unpinned",
        }
        if self.prefill:
            shown["prefill_threads"] = self.prefill_threads
            shown["prefill_cores"] = list(self.prefill_cores) or "unpinned"
        return shown


@dataclass(frozen=True)
class Target:
    """A running stack as a load generator sees it."""

    client: CompletionClient
    vocabulary: Vocabulary

    @classmethod
    def of(cls, url: str, *, vocab_size: int = 0, timeout_s: float = 300.0) -> Target:
        """Ask the server for its model and, unless `vocab_size` is given, its vocabulary. Raises ServerError."""
        with httpx.Client(base_url=url, timeout=10.0, trust_env=False) as asking:
            server = ask_server(asking, "")
            token_ids = ask_token_ids(asking, server.model, vocab_size)
        return cls(CompletionClient(url, RequestOptions(server.model, timeout_s=timeout_s)), Vocabulary(token_ids))

    def workload(self, input_len: int, output_len: int, seed: int) -> Workload:
        """Fixed lengths, no shared prefixes."""
        return Workload(
            self.vocabulary, LengthRange(input_len, input_len), LengthRange(output_len, output_len), seed=seed
        )


def scrape(worker: StackProcess) -> dict[str, float]:
    """A worker's metrics by sample name, summed over labels."""
    text = httpx.get(f"{worker.http_url}/metrics", timeout=10.0, trust_env=False).text
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def stack_parser(program: str, about: str | None, *, plot: bool = False) -> ArgumentParser:
    """The options of all scripts that start stacks."""
    parser = script_parser(program, about, model="model to serve", plot=plot)
    parser.add_argument("--dtype", default="auto", help="number type of weights and KV")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a KV block")
    parser.add_argument("--vocab-size", type=int, default=0, help="draw token ids below this; 0: ask the server")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--log-dir", type=Path, help="keep the processes' logs here")
    return parser
