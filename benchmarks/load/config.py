"""The settings of `diptych bench`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from benchmarks.load.arrivals import BURST, RAMP, STEPS, RateProfile
from benchmarks.load.workload import LengthRange
from common.config.field import Config, setting
from common.errors import ConfigError

# Headings of the help, in its order.
_SERVER, _LOAD, _REQUESTS, _TRACE, _GOALS, _OUTPUT = "Server", "Load", "Requests", "Trace", "Goals", "Output"

_LENGTH = r"[0-9]+(-[0-9]+)?"
_LENGTH_WORDS = "a length such as 128, or a range such as 64-512"
_POSITIVE_NUMBER = r"([0-9]*\.?[0-9]+(e[+-]?[0-9]+)?)"
DEFAULT_CONCURRENCY = 8
DEFAULT_NUM_REQUESTS = 100


@dataclass(frozen=True)
class BenchConfig(Config):
    """A load on one OpenAI-compatible URL, and the outputs of the measurement."""

    section: ClassVar[str] = "bench"
    env_prefix: ClassVar[str] = "BENCH"
    about: ClassVar[str] = (
        "Loads any OpenAI-compatible server and measures time to first token (TTFT), time per output token (TPOT),\n"
        "inter-token and end-to-end latency, throughput and goodput. The load is closed (--concurrency), open\n"
        "(--rate, --rates, --ramp, --burst) or a trace's (--trace); --find-rate finds the highest rate within goals."
    )

    url: str = setting(
        "http://127.0.0.1:8000",
        "server to load, without the /v1",
        group=_SERVER,
        pattern=r"https?://[^/\s]+[^\s]*",
        expects="an http:// or https:// URL",
    )
    model: str = setting("", "model to ask for; empty: the first one that /v1/models lists", group=_SERVER)
    endpoint: str = setting(
        "completions",
        "completions sends token ids, so lengths are exact; chat sends words, so lengths are about right",
        group=_SERVER,
        choices=("completions", "chat"),
    )
    api_key: str = setting("", "sent as Authorization: Bearer", group=_SERVER, secret=True, metavar="KEY")
    timeout_s: float = setting(600.0, "seconds after which one request has failed", group=_SERVER, ge=0.01, le=86400)
    keep_alive: bool = setting(True, "reuse connections", group=_SERVER)

    rate: str = setting(
        "",
        "open loop: requests a second on average, arriving at random (Poisson); inf: all at once",
        group=_LOAD,
        pattern=rf"({_POSITIVE_NUMBER}|inf)?",
        expects="a number above 0, or inf",
        metavar="R",
    )
    rates: str = setting(
        "",
        "open loop: rates over time, as RATExSECONDS for a step and RATE-RATExSECONDS for an even change: 2x30,8-2x60",
        group=_LOAD,
        pattern=rf"({STEPS})?",
        expects="parts such as 2x30 or 2-8x30, separated by commas",
        metavar="R",
    )
    ramp: str = setting(
        "",
        "open loop: from one rate evenly to another in --duration-s: 2:8",
        group=_LOAD,
        pattern=rf"({RAMP})?",
        expects="two rates such as 2:8",
        metavar="R:R",
    )
    burst: str = setting(
        "",
        "open loop: one rate, and another for some seconds in the middle of --duration-s: 2:20x10",
        group=_LOAD,
        pattern=rf"({BURST})?",
        expects="two rates and seconds such as 2:20x10",
        metavar="R:RxS",
    )
    concurrency: int = setting(
        0,
        f"closed loop: requests in flight at all times; 0: {DEFAULT_CONCURRENCY}, unless a rate or --trace is given",
        group=_LOAD,
        ge=0,
        le=65536,
    )
    num_requests: int = setting(
        0,
        f"requests to send; 0: {DEFAULT_NUM_REQUESTS}, the whole trace, or as many as fit --duration-s",
        group=_LOAD,
        ge=0,
        le=10**9,
    )
    duration_s: float = setting(
        0.0, "seconds after which no more requests are sent; 0: no limit", group=_LOAD, ge=0, le=10**7
    )
    find_rate: bool = setting(
        False,
        "find the highest rate at which --slo-quantile of requests meet the goals, from --rate on (else from that of"
        " one request at a time); each rate gets --num-requests or more, and at most --duration-s",
        group=_LOAD,
    )
    rate_tolerance: float = setting(
        0.05,
        "end the search when the lowest rate that misses is higher by at most this share",
        group=_LOAD,
        ge=0.001,
        le=0.9,
    )
    warmup: int = setting(2, "requests sent, one by one, before measuring starts", group=_LOAD, ge=0, le=10**6)
    trace: str = setting(
        "", "take lengths, shared prefixes and arrivals from this Azure CSV or Mooncake JSON-lines file, plain or .gz;"
        " with --rate or --concurrency only lengths and prefixes", group=_TRACE, metavar="FILE",
    )  # fmt: skip
    speedup: float = setting(1.0, "replay a trace's arrivals this many times as fast", group=_TRACE, ge=1e-6, le=1e9)
    jitter_s: float = setting(
        0.0, "delay each of a trace's arrivals by up to so many seconds", group=_TRACE, ge=0, le=3600
    )
    trace_scale: float = setting(1.0, "multiply a trace's lengths, for small models", group=_TRACE, ge=1e-4, le=100)
    max_input_len: int = setting(0, "cut a trace's prompts to so many tokens; 0: no limit", group=_TRACE, ge=0)
    max_output_len: int = setting(0, "cut a trace's outputs to so many tokens; 0: no limit", group=_TRACE, ge=0)

    input_len: str = setting(
        "128", "prompt length in tokens, or a range a-b", group=_REQUESTS, pattern=_LENGTH, expects=_LENGTH_WORDS
    )
    output_len: str = setting(
        "128", "tokens to generate, or a range a-b", group=_REQUESTS, pattern=_LENGTH, expects=_LENGTH_WORDS
    )
    shared_prefix_len: int = setting(
        0, "leading tokens that all prompts have in common, part of their length", group=_REQUESTS, ge=0, le=10**7
    )
    prompt_text: bool = setting(
        False, "send words instead of token ids, for servers that take none (always so for chat)", group=_REQUESTS
    )
    vocab_size: int = setting(
        0, "draw token ids below this; 0: from what /tokenize returns, else 1000 to 9999", group=_REQUESTS, ge=0
    )
    ignore_eos: bool = setting(True, "generate the full length, past end tokens", group=_REQUESTS)
    temperature: float = setting(0.0, "sampling temperature; 0 is greedy", group=_REQUESTS, ge=0, le=2)
    seed: int = setting(
        -1,
        "same seed, same requests; -1: a new one, so that no earlier run has filled a cache",
        group=_REQUESTS,
        ge=-1,
    )

    slo_ttft_ms: float = setting(0.0, "goodput counts requests with at most this TTFT; 0: any", group=_GOALS, ge=0)
    slo_tpot_ms: float = setting(0.0, "goodput counts requests with at most this TPOT; 0: any", group=_GOALS, ge=0)

    slo_quantile: float = setting(
        0.95, "share of requests that should meet both goals, for --find-rate", group=_GOALS, ge=0.01, le=0.9999
    )
    price_prefill: float = setting(0.0, "price of a prefill worker for an hour, in any currency", group=_GOALS, ge=0)
    price_decode: float = setting(0.0, "price of a decode worker for an hour", group=_GOALS, ge=0)

    config: str = setting(
        "", "TOML file with settings; flags and environment win over it", group=_OUTPUT, metavar="FILE", in_file=False
    )
    output: str = setting("", "write everything measured to this JSON file", group=_OUTPUT, metavar="FILE")
    plot: str = setting("", "draw the distributions and a timeline into this PNG file", group=_OUTPUT, metavar="FILE")
    progress: bool = setting(True, "show a progress bar on a terminal", group=_OUTPUT)

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
            raise ConfigError(loads[0], getattr(self, loads[0]), f"not together with {loads[1]}: a load has one form")
        if self.rate and float(self.rate) <= 0:
            raise ConfigError("rate", self.rate, "a number above 0, or inf")
        if math.isinf(float(self.rate or 0)) and not self.num_requests and not self.trace:
            raise ConfigError("num_requests", self.num_requests, "at least 1 when rate is inf")
        for name in ("ramp", "burst"):
            if getattr(self, name) and not self.duration_s:
                raise ConfigError("duration_s", self.duration_s, f"above 0 with {name}")
        try:
            _ = self.profile
        except ValueError as error:
            raise ConfigError(loads[0], getattr(self, loads[0]), str(error)) from error
        if self.find_rate:
            if not self.slo_ttft_ms and not self.slo_tpot_ms:
                raise ConfigError("slo_ttft_ms", self.slo_ttft_ms, "above 0 with find_rate, or slo_tpot_ms")
            if loads not in ([], ["rate"]) or math.isinf(float(self.rate or 0)):
                raise ConfigError(loads[0], getattr(self, loads[0]), "with find_rate only a finite rate to begin with")

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
