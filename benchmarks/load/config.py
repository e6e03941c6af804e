"""The settings of `diptych bench`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from benchmarks.load.arrivals import BURST, RAMP, STEPS, RateProfile
from benchmarks.load.workload import LengthRange
from common.config.field import Config, setting
from common.errors import ConfigError, UsageError

# Headings of the help, in its order.
_SERVER, _LOAD, _REQUESTS, _TRACE, _GOALS, _OUTPUT = "Target", "Load", "Requests", "Trace", "Latency goals", "Output"

_LENGTH = r"[0-9]+(-[0-9]+)?"
_LENGTH_WORDS = "a length such as 128, or a range such as 64-512"
_POSITIVE_NUMBER = r"([0-9]*\.?[0-9]+(e[+-]?[0-9]+)?)"
DEFAULT_CONCURRENCY = 8
DEFAULT_NUM_REQUESTS = 100


@dataclass(frozen=True)
class BenchConfig(Config):
    """Settings of `diptych bench`: the server, the load and the outputs."""

    section: ClassVar[str] = "bench"
    env_prefix: ClassVar[str] = "BENCH"
    about: ClassVar[str] = (
        "Benchmark an OpenAI-compatible server: time to first token (TTFT), time per output token (TPOT), throughput "
        "and goodput."
    )
    examples: ClassVar[tuple[tuple[str, str], ...]] = (
        ("diptych bench --concurrency 32", "closed loop"),
        ("diptych bench --rate 4 --duration-s 60", "open loop"),
        ("diptych bench --find-rate --slo-ttft-ms 500", "highest rate within a goal"),
    )

    url: str = setting(
        "http://127.0.0.1:8000",
        "URL of the server, without /v1",
        group=_SERVER,
        common=True,
        pattern=r"https?://[^/\s]+[^\s]*",
        expects="an http:// or https:// URL",
    )
    model: str = setting(
        "",
        "model name to request",
        group=_SERVER,
        default_note="the first model of /v1/models",
        common=True,
        metavar="NAME",
    )
    endpoint: str = setting(
        "completions",
        "API to use",
        group=_SERVER,
        details="`completions` sends token IDs, so prompt lengths are exact. `chat` sends words, so they are "
        "approximate.",
        common=True,
        choices=("completions", "chat"),
    )
    api_key: str = setting(
        "", "API key to send as a bearer token", group=_SERVER, common=True, secret=True, metavar="KEY"
    )
    timeout_s: float = setting(600.0, "maximum seconds per request", group=_SERVER, ge=0.01, le=86400)
    keep_alive: bool = setting(
        True,
        "reuse connections for several requests",
        off="open a new connection for each request",
        group=_SERVER,
    )

    rate: str = setting(
        "",
        "open loop: mean rate of Poisson arrivals in requests per second; inf sends all requests at once",
        group=_LOAD,
        common=True,
        pattern=rf"({_POSITIVE_NUMBER}|inf)?",
        expects="a number above 0, or inf",
        metavar="R",
    )
    rates: str = setting(
        "",
        "open loop: rates over time, as RATExSECONDS or RATE-RATExSECONDS, such as 2x30,8-2x60",
        group=_LOAD,
        pattern=rf"({STEPS})?",
        expects="parts such as 2x30 or 2-8x30, separated by commas",
        metavar="R",
    )
    ramp: str = setting(
        "",
        "open loop: linear change of the rate during --duration-s, such as 2:8",
        group=_LOAD,
        pattern=rf"({RAMP})?",
        expects="two rates such as 2:8",
        metavar="R:R",
    )
    burst: str = setting(
        "",
        "open loop: a rate, and a second rate for S seconds in the middle of --duration-s, such as 2:20x10",
        group=_LOAD,
        pattern=rf"({BURST})?",
        expects="two rates and seconds such as 2:20x10",
        metavar="R:RxS",
    )
    concurrency: int = setting(
        0,
        "closed loop: concurrent requests",
        group=_LOAD,
        default_note=f"{DEFAULT_CONCURRENCY}, unless a rate or --trace is set",
        common=True,
        ge=0,
        le=65536,
    )
    num_requests: int = setting(
        0,
        "number of requests",
        group=_LOAD,
        default_note=f"{DEFAULT_NUM_REQUESTS}, the whole trace, or as --duration-s allows",
        common=True,
        ge=0,
        le=10**9,
    )
    duration_s: float = setting(
        0.0,
        "seconds after which no more requests are sent",
        group=_LOAD,
        default_note="no limit",
        common=True,
        ge=0,
        le=10**7,
    )
    find_rate: bool = setting(
        False,
        "find the highest rate at which --slo-quantile of the requests meet the goals",
        group=_LOAD,
        details="The search starts at --rate, or at the rate of one request at a time. Each rate gets at least "
        "--num-requests requests, for at most --duration-s.",
        common=True,
    )
    rate_tolerance: float = setting(
        0.05,
        "relative precision of --find-rate",
        group=_LOAD,
        ge=0.001,
        le=0.9,
    )
    warmup: int = setting(2, "sequential requests before the measurement", group=_LOAD, ge=0, le=10**6)
    trace: str = setting(
        "",
        "trace of lengths, shared prefixes and arrivals: Azure CSV or Mooncake JSON lines, optionally .gz",
        group=_TRACE,
        details="With --rate or --concurrency, only its lengths and prefixes are used.",
        common=True,
        metavar="FILE",
    )
    speedup: float = setting(1.0, "replay speed of the arrivals of a trace", group=_TRACE, ge=1e-6, le=1e9)
    jitter_s: float = setting(
        0.0, "maximum random delay of each arrival of a trace, in seconds", group=_TRACE, ge=0, le=3600
    )
    trace_scale: float = setting(1.0, "factor for the lengths of a trace", group=_TRACE, ge=1e-4, le=100)
    max_input_len: int = setting(
        0, "maximum prompt length of a trace, in tokens", group=_TRACE, default_note="no limit", ge=0
    )
    max_output_len: int = setting(
        0, "maximum output length of a trace, in tokens", group=_TRACE, default_note="no limit", ge=0
    )

    input_len: str = setting(
        "128",
        "prompt length in tokens, or a range such as 64-512",
        group=_REQUESTS,
        common=True,
        pattern=_LENGTH,
        expects=_LENGTH_WORDS,
        metavar="N[-M]",
    )
    output_len: str = setting(
        "128",
        "output length in tokens, or a range such as 64-512",
        group=_REQUESTS,
        common=True,
        pattern=_LENGTH,
        expects=_LENGTH_WORDS,
        metavar="N[-M]",
    )
    shared_prefix_len: int = setting(0, "tokens at the start that all prompts share", group=_REQUESTS, ge=0, le=10**7)
    prompt_text: bool = setting(
        False,
        "send words instead of token IDs, for servers without support for IDs",
        group=_REQUESTS,
    )
    vocab_size: int = setting(
        0,
        "upper limit of random token IDs",
        group=_REQUESTS,
        default_note="IDs from /tokenize, else 1000 to 9999",
        ge=0,
    )
    ignore_eos: bool = setting(
        True,
        "generate the full length, regardless of end-of-sequence tokens",
        off="stop at end-of-sequence tokens",
        group=_REQUESTS,
    )
    temperature: float = setting(0.0, "sampling temperature; 0 selects greedy sampling", group=_REQUESTS, ge=0, le=2)
    seed: int = setting(
        -1,
        "random seed of the requests; -1 selects a new one, which avoids cached prompts",
        group=_REQUESTS,
        ge=-1,
    )

    slo_ttft_ms: float = setting(
        0.0,
        "goal for the TTFT, in milliseconds, for goodput",
        group=_GOALS,
        default_note="no goal",
        common=True,
        ge=0,
    )
    slo_tpot_ms: float = setting(
        0.0,
        "goal for the TPOT, in milliseconds, for goodput",
        group=_GOALS,
        default_note="no goal",
        common=True,
        ge=0,
    )

    slo_quantile: float = setting(
        0.95,
        "fraction of requests that must meet both goals, for --find-rate",
        group=_GOALS,
        ge=0.01,
        le=0.9999,
    )
    price_prefill: float = setting(0.0, "hourly price of a prefill worker, in any currency", group=_GOALS, ge=0)
    price_decode: float = setting(0.0, "hourly price of a decode worker, in any currency", group=_GOALS, ge=0)

    config: str = setting(
        "",
        "TOML file with settings",
        group=_OUTPUT,
        metavar="FILE",
        in_file=False,
    )
    output: str = setting("", "JSON file for all results", group=_OUTPUT, common=True, metavar="FILE")
    plot: str = setting(
        "", "PNG file for plots of the latencies and a timeline", group=_OUTPUT, common=True, metavar="FILE"
    )
    progress: bool = setting(
        True,
        "show a progress bar on a terminal",
        off="do not show a progress bar",
        group=_OUTPUT,
    )

    def check(self) -> None:
        self._check_load()
        for name in ("input_len", "output_len"):
            try:
                LengthRange.parse(getattr(self, name))
            except ValueError as error:
                raise ConfigError(name, getattr(self, name), f"{_LENGTH_WORDS} ({error})") from error
        shortest = LengthRange.parse(self.input_len).low
        if self.shared_prefix_len > shortest:
            raise ConfigError("shared_prefix_len", self.shared_prefix_len, f"at most the shortest prompt, {shortest}")

    def _check_load(self) -> None:
        loads = [name for name in ("rate", "rates", "ramp", "burst", "concurrency") if getattr(self, name)]
        if len(loads) > 1:
            raise ConfigError(loads[0], getattr(self, loads[0]), f"omitted with --{loads[1].replace('_', '-')}")
        if self.rate and float(self.rate) <= 0:
            raise ConfigError("rate", self.rate, "a number above 0, or inf")
        if math.isinf(float(self.rate or 0)) and not self.num_requests and not self.trace:
            raise ConfigError("num_requests", self.num_requests, "at least 1 with --rate inf")
        for name in ("ramp", "burst"):
            if getattr(self, name) and not self.duration_s:
                raise ConfigError("duration_s", self.duration_s, f"above 0 with --{name}")
        try:
            _ = self.profile
        except ValueError as error:
            raise UsageError(loads[0], f"invalid --{loads[0]} {getattr(self, loads[0])}: {error}") from error
        if self.find_rate:
            if not self.slo_ttft_ms and not self.slo_tpot_ms:
                raise ConfigError("slo_ttft_ms", self.slo_ttft_ms, "above 0 with --find-rate, unless --slo-tpot-ms is")
            if loads not in ([], ["rate"]) or math.isinf(float(self.rate or 0)):
                raise ConfigError(loads[0], getattr(self, loads[0]), "omitted with --find-rate, except a finite --rate")

    @property
    def profile(self) -> RateProfile | None:
        """The rate over time, if it changes. Raises ValueError for one that makes no sense."""
        if self.rates:
            return RateProfile.steps(self.rates)
        if self.ramp:
            return RateProfile.ramp(self.ramp, self.duration_s)
        return RateProfile.burst(self.burst, self.duration_s) if self.burst else None

    @property
    def prices(self) -> Mapping[str, float]:
        """Of an hour of a worker, by role."""
        return {"prefill": self.price_prefill, "decode": self.price_decode}

    @property
    def sends_text(self) -> bool:
        return self.prompt_text or self.endpoint == "chat"

    @property
    def replays_arrivals(self) -> bool:
        """Requests arrive at the trace's times."""
        return bool(self.trace) and not (self.rate or self.profile or self.concurrency)
