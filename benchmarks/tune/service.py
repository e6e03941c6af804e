"""Measures settings on real workers: starts them, fits their step times, and drives the load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.load.client import CompletionClient, RequestOptions, Server, ask_server, ask_token_ids, auth_headers
from benchmarks.load.load import Load
from benchmarks.load.summary import RequestRecord, Summary, summarise
from benchmarks.load.trace import MOONCAKE_BLOCK_TOKENS, TraceRow, read_trace
from benchmarks.load.watch import workers_in
from benchmarks.load.workload import LengthRange, Vocabulary, Workload, fit_rows, poisson_arrivals, trace_arrivals
from benchmarks.plan.evidence import wilson
from benchmarks.plan.profile import Phase, drive, num_steps
from benchmarks.plan.running import FEWEST_STEPS, ask_load, kinds_in
from benchmarks.stack import Stack, StackSettings
from benchmarks.tune.search import Setting

WARM_S: Final = 1.5
"""Duration of each warm-up phase, in seconds."""
MOST_EXTRA_PHASES: Final = 40
"""Further warm-up phases until each worker has computed enough steps to fit its model."""
CLIENTS, RATE_SHARE = 4, 0.7
"""Concurrent clients of the closed loop that determines the rate, and the share of its rate that is used."""


@dataclass(frozen=True, slots=True)
class TuneLoad:
    """Requests of a trace, or Poisson arrivals at `rate` per second (0: not determined yet)."""

    trace: str = ""
    speedup: float = 1.0
    rate: float = 0.0
    input_len: LengthRange = LengthRange(512, 512)
    output_len: LengthRange = LengthRange(64, 64)
    seed: int = 1
    max_model_len: int = 0

    @property
    def max_lengths(self) -> tuple[int, int]:
        """Maximum prompt and answer of a trace, in tokens, so that they fit into the model together; 0: no limit."""
        return self.max_model_len * 3 // 4, self.max_model_len // 4

    def rows(self) -> Sequence[TraceRow]:
        """Return the requests of the trace. Raises TraceError."""
        prompt, answer = self.max_lengths
        return fit_rows(read_trace(Path(self.trace)), max_input_len=prompt, max_output_len=answer) if self.trace else ()

    def arrivals(self, seconds: float) -> list[float]:
        """Return the arrival times within `seconds`, ascending. Raises TraceError."""
        if self.trace:
            times: Any = trace_arrivals(self.rows(), speedup=self.speedup, seed=self.seed)
        else:
            times = poisson_arrivals(self.rate, self.seed)
        found = []
        for at_s in times:
            if at_s >= seconds:
                break
            found.append(at_s)
        return found


@dataclass(frozen=True, slots=True)
class Measured:
    """Latencies of a setting on real workers. `workers`: what the router reports of them, as `kinds_in` returns it, and
    `num_workers` their number by role."""

    setting: Setting | None
    summary: Summary
    rate: float
    workers: Mapping[str, Any]
    num_workers: Mapping[str, int]

    @property
    def attainment(self) -> float:
        """Share of all requests that met both goals."""
        return self.summary.num_good / max(1, self.summary.num_requests)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the attainment."""
        low, high = wilson(self.summary.num_good, max(1, self.summary.num_requests))
        return max(0.0, low), min(1.0, high)


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """The model and how its workers run, or the `url` of a running router; goals in milliseconds."""

    model: str
    ttft_ms: float
    tpot_ms: float
    url: str = ""
    api_key: str = ""
    dtype: str = "auto"
    quantization: str = "none"
    kv_memory_gib: float = 1.0

    def stack(self, setting: Setting, changed: Mapping[str, int]) -> StackSettings:
        """Return the processes of a setting. `changed`: flags of the setting that differ from the base."""
        by_process: dict[str, list[str]] = {"router": [], "prefill_worker": [], "decode_worker": []}
        for section, values in sections(self, setting, changed).items():
            for name, value in values.items():
                by_process[section] += [f"--{name.replace('_', '-')}", f"{value}"]
        return StackSettings(
            setting.candidate.num_prefill,
            setting.candidate.num_decode,
            model=self.model,
            dtype=self.dtype,
            quantization=self.quantization,
            worker_flags=("--kv-memory-gib", f"{self.kv_memory_gib:g}"),
            router_flags=by_process["router"],
            prefill_flags=by_process["prefill_worker"],
            decode_flags=by_process["decode_worker"],
        )


def sections(options: ServiceOptions, setting: Setting, changed: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return the settings of each process, as sections of a configuration file."""
    found: dict[str, dict[str, Any]] = {
        "router": {"slo_ttft_ms": options.ttft_ms, "slo_tpot_ms": options.tpot_ms},
        "prefill_worker": {},
        "decode_worker": {"slo_tpot_ms": options.tpot_ms},
    }
    if setting.refuses:
        found["router"]["slo_refuse"] = "predicted"
    owners = {"local_prefill_threshold": "router", "max_num_batched_tokens": "prefill_worker"}
    for name, value in changed.items():
        found[owners.get(name, "decode_worker")][name] = value
    return found


class Service:
    """Measures settings. `advance` is called with a few words on each phase."""

    def __init__(self, options: ServiceOptions, load: TuneLoad, advance: Callable[[str], None]) -> None:
        self.options, self.load, self.advance = options, load, advance

    def measure(self, setting: Setting | None, changed: Mapping[str, int], seconds: float) -> Measured:
        """Drive the load for `seconds`, on new workers with the setting, or on the running service.

        Raises StackError, ServerError, ConfigError and TraceError.
        """
        if self.options.url or setting is None:
            return self._measure(self.options.url, None, seconds)
        self.advance("workers start")
        with Stack(self.options.stack(setting, changed)) as stack:
            return self._measure(stack.url, setting, seconds)

    def _measure(self, url: str, setting: Setting | None, seconds: float) -> Measured:
        with httpx.Client(
            base_url=url, headers=auth_headers(self.options.api_key), timeout=10.0, trust_env=False
        ) as asking:
            server = ask_server(asking, "")
            token_ids = ask_token_ids(asking, server.model)
        self.load = replace(self.load, max_model_len=server.max_model_len or 0)
        self.advance("warm-up")
        rate = self._warm_up(url, server, token_ids, 2.0 * seconds)
        if not self.load.rate and not self.load.trace:
            self.load = replace(self.load, rate=RATE_SHARE * rate)
        self.advance(f"load for {seconds:.0f} s")
        records = asyncio.run(self._drive(url, server, token_ids, seconds))
        summary = summarise(records, slo_ttft_ms=self.options.ttft_ms, slo_tpot_ms=self.options.tpot_ms)
        load = ask_load(url, self.options.api_key)
        return Measured(setting, summary, len(records) / seconds, kinds_in(load, url), workers_in(load))

    def _lengths(self) -> tuple[int, int]:
        """Return a long prompt and a long answer of the load, in tokens."""
        if rows := self.load.rows():
            prompts, answers = sorted(row.input_len for row in rows), sorted(row.output_len for row in rows)
            return prompts[len(prompts) * 9 // 10], max(2, answers[len(answers) * 9 // 10])
        return self.load.input_len.high, max(2, self.load.output_len.high)

    def _warm_up(self, url: str, server: Server, token_ids: tuple[int, ...], limit_s: float) -> float:
        """Let workers fit their step times with prompts and batches of several sizes. Return requests per second.

        Further phases begin only within `limit_s`.
        """
        deadline = time.monotonic() + limit_s
        prompt, answer = self._lengths()
        seconds = WARM_S
        phases = [Phase(num, max(2, round(share * prompt)), 1, seconds) for share in (0.25, 0.5, 1.0) for num in (1, 2)]
        phases += [Phase(num, max(2, prompt - num), answer, seconds) for num in (1, 2)]
        for phase in phases:
            asyncio.run(drive(url, server.model, token_ids, phase, self.options.api_key))
        last = Phase(CLIENTS, max(2, prompt - CLIENTS), answer, 2 * seconds)
        token_s = asyncio.run(drive(url, server.model, token_ids, last, self.options.api_key))
        for number in range(1, MOST_EXTRA_PHASES):
            if time.monotonic() > deadline:
                break
            roles = {worker["role"] for worker in ask_load(url, self.options.api_key)["workers"]}
            if all(num_steps(url, role, self.options.api_key) >= FEWEST_STEPS for role in roles):
                break
            more = Phase(CLIENTS, max(2, prompt - CLIENTS - number % max(1, prompt // 2)), answer, seconds)
            asyncio.run(drive(url, server.model, token_ids, more, self.options.api_key))
        return 1.0 / (token_s * last.input_len)

    async def _drive(
        self, url: str, server: Server, token_ids: tuple[int, ...], seconds: float
    ) -> Sequence[RequestRecord]:
        workload = Workload(
            Vocabulary(token_ids),
            self.load.input_len,
            self.load.output_len,
            seed=self.load.seed + int(time.time()),  # no prompt is cached from an earlier run
            rows=self.load.rows(),
            block_tokens=MOONCAKE_BLOCK_TOKENS,
        )
        client = CompletionClient(url, RequestOptions(server.model), api_key=self.options.api_key)
        load = Load(client, workload)
        try:
            await load.open_loop(self.load.arrivals(seconds))
        finally:
            await client.close()
        return load.records


def plan_values(measured: Measured, load: TuneLoad, options: ServiceOptions, quantile: float) -> dict[str, Any]:
    """Return the input of a plan: the measured workers under the load, without lists of settings to try."""
    of_load: dict[str, Any] = {"rate": load.rate}
    if load.trace:
        prompt, answer = load.max_lengths
        of_load = {"trace": load.trace, "speedup": load.speedup, "max_input_len": prompt, "max_output_len": answer}
    for name in ("input_len", "output_len"):
        length: LengthRange = getattr(load, name)
        of_load[name] = f"{length.low}-{length.high}"
    workers = {name: measured.workers[name] for name in ("prefill", "decode", "model") if name in measured.workers}
    return {
        **workers,
        "load": of_load,
        "goals": {"ttft_ms": options.ttft_ms, "tpot_ms": options.tpot_ms, "quantile": quantile},
        "seed": load.seed,
    }
