"""Measures settings on real workers: starts them, fits their step times, and drives the load."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.load.client import (
    CompletionClient,
    RequestOptions,
    Server,
    ServerError,
    ask_server,
    ask_token_ids,
    auth_headers,
)
from benchmarks.load.load import Load
from benchmarks.load.summary import INTERRUPTED, RequestRecord, Summary, summarise
from benchmarks.load.trace import MOONCAKE_BLOCK_TOKENS, TraceRow, read_trace
from benchmarks.load.watch import workers_in
from benchmarks.load.workload import LengthRange, Vocabulary, Workload, fit_rows, poisson_arrivals, trace_arrivals
from benchmarks.plan.evidence import wilson
from benchmarks.plan.profile import Phase, drive, num_steps
from benchmarks.plan.running import FEWEST_STEPS, ask_load, kinds_in
from benchmarks.stack import Stack, StackError, StackSettings
from benchmarks.tune.search import Setting
from common.errors import ConfigError

WARM_S: Final = 1.5
"""Maximum duration of each warm-up phase, in seconds."""
LEAST_LOAD: Final = 0.5
"""Least share of the duration of the load; a setting with less is not measured."""
START_MARGIN: Final = 1.5
"""Time planned for a start of workers, as a multiple of the last one."""
MOST_TAIL: Final = 0.5
"""Maximum wait for the last answers, as a share of the duration of the load."""
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
        """Return the requests of the trace, which is read once. Raises TraceError."""
        return _rows(self.trace, *self.max_lengths) if self.trace else ()

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


@functools.lru_cache(maxsize=1)
def _trace(path: str) -> Sequence[TraceRow]:
    return tuple(read_trace(Path(path)))  # may take many seconds


@functools.lru_cache(maxsize=1)
def _rows(path: str, max_input_len: int, max_output_len: int) -> Sequence[TraceRow]:
    return tuple(fit_rows(_trace(path), max_input_len=max_input_len, max_output_len=max_output_len))


@dataclass(frozen=True, slots=True)
class Measured:
    """Latencies of a setting on real workers. `workers`: what the router reports of them, as `kinds_in` returns it
    (empty unless their step times were asked for), and `num_workers` their number by role."""

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
    quantization: str = "auto"
    kv_memory_gib: float = 1.0

    @property
    def of_model(self) -> dict[str, Any]:
        """Settings of all processes that are started: the model and how its workers hold it. Empty with a `url`."""
        names = () if self.url else ("model", "dtype", "quantization", "kv_memory_gib")
        return {name: getattr(self, name) for name in names}

    def answer_s(self, output_len: int) -> float:
        """Return the longest duration of an answer within the goals, in seconds."""
        return 1e-3 * (self.ttft_ms + output_len * self.tpot_ms)

    def stack(self, setting: Setting, changed: Mapping[str, int], ready_timeout_s: float) -> StackSettings:
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
            tied=True,
            ready_timeout_s=ready_timeout_s,
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
    """Measures settings. `advance` is called with a few words on each phase.

    `start_s`: time in seconds that the last workers took to start.
    """

    def __init__(self, options: ServiceOptions, load: TuneLoad, advance: Callable[[str], None]) -> None:
        self.options, self.load, self.advance = options, load, advance
        self.start_s = 0.0

    def measure(
        self, setting: Setting | None, changed: Mapping[str, int], load_s: float, end_at: float, *, fits: bool
    ) -> Measured:
        """Drive the load for `load_s`, on new workers with the setting, or on the running service.

        Ends at `end_at` (monotonic seconds), with a shorter load if necessary; workers stop after that. `fits`: let the
        workers fit their step times first.

        Raises StackError, ServerError, ConfigError and TraceError, and TimeoutError with the reason when too little
        time is left for the load.
        """
        if self.options.url or setting is None:
            return self._measure(self.options.url, load_s, end_at, fits)
        start_s = end_at - time.monotonic() - LEAST_LOAD * load_s - self._tail_s(load_s)
        if start_s <= 0.0:
            raise TimeoutError("no time left to start workers")
        self.advance("workers start")
        began_at = time.monotonic()
        try:
            with Stack(self.options.stack(setting, changed, start_s)) as stack:
                self.start_s = time.monotonic() - began_at
                return self._measure(stack.url, load_s, end_at, fits)
        except StackError as error:
            if time.monotonic() < began_at + start_s:
                raise
            raise TimeoutError(f"workers did not start within {start_s:.0f} s") from error

    def needed_s(self, load_s: float) -> float:
        """Return the time that another measurement needs if its workers start like the last ones, in seconds."""
        return START_MARGIN * self.start_s + load_s + self._tail_s(load_s)

    def _tail_s(self, load_s: float) -> float:
        return min(self.options.answer_s(self._lengths()[1]), MOST_TAIL * load_s)

    def _measure(self, url: str, load_s: float, end_at: float, fits: bool) -> Measured:
        with httpx.Client(
            base_url=url, headers=auth_headers(self.options.api_key), timeout=10.0, trust_env=False
        ) as asking:
            server = ask_server(asking, "")
            token_ids = ask_token_ids(asking, server.model)
        self.load = replace(self.load, max_model_len=server.max_model_len or 0)
        self.advance("warm-up")
        tail_s = self._tail_s(load_s)
        rate = self._warm_up(url, server, token_ids, end_at - tail_s - load_s, fits)
        if not self.load.rate and not self.load.trace:
            if not rate:
                raise TimeoutError("the warm-up ended before the rate was known")
            self.load = replace(self.load, rate=RATE_SHARE * rate)
        seconds = min(load_s, end_at - tail_s - time.monotonic())
        if seconds < LEAST_LOAD * load_s:
            raise TimeoutError("start and warm-up of the workers left too little time for the load")
        self.advance(f"load for {seconds:.0f} s")
        records = asyncio.run(self._drive(url, server, token_ids, seconds, tail_s))
        if not records:
            raise TimeoutError(f"no request arrived and ended within {seconds + tail_s:.0f} s")
        summary = summarise(records, slo_ttft_ms=self.options.ttft_ms, slo_tpot_ms=self.options.tpot_ms)
        load = ask_load(url, self.options.api_key)
        try:
            workers = kinds_in(load, url) if fits else {}
        except ConfigError as error:
            raise TimeoutError(f"a worker has computed fewer than {FEWEST_STEPS} steps") from error
        return Measured(summary, len(records) / seconds, workers, workers_in(load))

    def _lengths(self) -> tuple[int, int]:
        """Return a long prompt and a long answer of the load, in tokens."""
        if rows := self.load.rows():
            prompts, answers = sorted(row.input_len for row in rows), sorted(row.output_len for row in rows)
            return prompts[len(prompts) * 9 // 10], max(2, answers[len(answers) * 9 // 10])
        return self.load.input_len.high, max(2, self.load.output_len.high)

    def _warm_up(self, url: str, server: Server, token_ids: tuple[int, ...], end_at: float, fits: bool) -> float:
        """Drive prompts and batches of several sizes until `end_at` (monotonic seconds) at the latest.

        Return requests per second, 0 if the time did not suffice. With `fits`, more phases follow until each worker has
        fitted its step times.
        """
        prompt, answer = self._lengths()
        phases = [Phase(num, max(2, round(share * prompt)), 1, WARM_S) for share in (0.25, 0.5, 1.0) for num in (1, 2)]
        phases += [Phase(num, max(2, prompt - num), answer, WARM_S) for num in (1, 2)]
        phases.append(Phase(CLIENTS, max(2, prompt - CLIENTS), answer, 2.0 * WARM_S))
        share = min(1.0, max(0.0, end_at - time.monotonic()) / sum(phase.seconds for phase in phases))
        token_s = None
        for phase in phases:
            token_s = self._drive_phase(url, server, token_ids, replace(phase, seconds=share * phase.seconds), end_at)
        rate = 1.0 / (token_s * phases[-1].input_len) if token_s else 0.0
        for number in range(1, MOST_EXTRA_PHASES if fits else 1):
            roles = {worker["role"] for worker in ask_load(url, self.options.api_key)["workers"]}
            missing = {role for role in roles if num_steps(url, role, self.options.api_key) < FEWEST_STEPS}
            if not missing:
                break
            more = Phase(CLIENTS, max(2, prompt - CLIENTS - number % max(1, prompt // 2)), answer, WARM_S)
            if missing == {"prefill"}:  # each prompt has its own step
                more = Phase(1, max(2, prompt - number % max(1, prompt // 2)), 1, 2.0 * WARM_S)
            if self._drive_phase(url, server, token_ids, more, end_at) is None:
                break
        return rate

    def _drive_phase(
        self, url: str, server: Server, token_ids: tuple[int, ...], phase: Phase, end_at: float
    ) -> float | None:
        """Return the seconds for each prompt token, None if `end_at` came first. Raises ServerError."""
        limit_s = end_at - time.monotonic()
        if limit_s <= 0.0:
            return None
        try:
            return asyncio.run(drive(url, server.model, token_ids, phase, self.options.api_key, limit_s))
        except ServerError:
            if time.monotonic() < end_at:
                raise
            return None

    async def _drive(
        self, url: str, server: Server, token_ids: tuple[int, ...], seconds: float, tail_s: float
    ) -> Sequence[RequestRecord]:
        """Return the requests that arrive within `seconds` and are decided `tail_s` after that."""
        workload = Workload(
            Vocabulary(token_ids),
            self.load.input_len,
            self.load.output_len,
            seed=self.load.seed + int(time.time()),  # no prompt is cached from an earlier run
            rows=self.load.rows(),
            block_tokens=MOONCAKE_BLOCK_TOKENS,
        )
        longest = max((row.output_len for row in workload.rows), default=self.load.output_len.high)
        arrivals, answer_s = self.load.arrivals(seconds), self.options.answer_s(longest)
        client = CompletionClient(url, RequestOptions(server.model), api_key=self.options.api_key)
        load = Load(client, workload)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds + tail_s):
                    await load.open_loop(arrivals)
            ended_at = time.perf_counter()
        finally:
            await client.close()
        return [one for one in load.records if is_decided(one, ended_at, self.options.ttft_ms * 1e-3, answer_s)]


def is_decided(record: RequestRecord, ended_at: float, ttft_s: float, answer_s: float) -> bool:
    """Whether a request has met or missed the goals. An interrupted one has missed them if it is late already.

    `ended_at`: time of the interruption. `ttft_s`, `answer_s`: durations of the first token and of the longest answer
    within the goals.
    """
    if record.outcome not in ("", INTERRUPTED):
        return True
    if not record.start:
        return False
    first_s = record.ttft_s if record.token_times else ended_at - record.start
    return first_s > ttft_s or ended_at - record.start > answer_s


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
