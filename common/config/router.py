"""Settings of the router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from common.config.access import AccessSettings
from common.config.cluster import DiscoverySettings
from common.config.common import HOST, CommonConfig
from common.config.field import setting
from common.errors import ConfigError

_ADDRESS = r"(tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}|ipc://.+)"


@dataclass(frozen=True)
class RouterConfig(CommonConfig, DiscoverySettings, AccessSettings):
    """The router: HTTP in front, workers behind. It holds the tokeniser, never the weights."""

    section: ClassVar[str] = "router"
    env_prefix: ClassVar[str] = "ROUTER"
    about: ClassVar[str] = (
        "The OpenAI-compatible front door: sends each request to a prefill and a decode worker, streams the answer."
    )

    host: str = setting(
        "127.0.0.1",
        "address the HTTP server listens on",
        group="HTTP",
        pattern=HOST,
        expects="a host name or IP address",
    )
    port: int = setting(8000, "port the HTTP server listens on; 0 picks a free one", group="HTTP", ge=0, le=65535)
    api_key: str = setting(
        "",
        "key that clients must send (Authorization: Bearer); empty: none. Better set by environment",
        group="HTTP",
        secret=True,
        metavar="KEY",
    )
    max_body_bytes: int = setting(
        8 * 1024 * 1024, "largest request body in bytes; larger ones get 413", group="HTTP", ge=1024, le=1_000_000_000
    )
    keepalive_s: float = setting(
        15.0, "seconds of silence after which a stream gets a keep-alive comment", group="HTTP", ge=0.01, le=300
    )
    otlp_traces_endpoint: str = setting(
        "",
        "URL that a trace of each request is sent to, as OTLP over HTTP; empty: none. Needs the extra `tracing`; "
        "OpenTelemetry's own OTEL_* variables say the rest",
        group="HTTP",
        pattern=r"(|https?://[^\s/]+(/\S*)?)",
        expects="a URL such as http://collector:4318/v1/traces",
        metavar="URL",
    )
    served_model_name: str = setting(
        "", "name that clients use for the model; empty: the model's own name", group="Model", metavar="NAME"
    )
    reasoning: str = setting(
        "auto",
        "auto: what a chat answer has between <think> and </think> is told apart from its text, where the model's chat "
        "template knows these marks; none: it is text like any other",
        group="Model",
        choices=("auto", "none"),
    )
    tokenizer_threads: int = setting(
        2, "threads that tokenise prompts, beside the event loop", group="Model", ge=1, le=64
    )
    max_tokenize_bytes: int = setting(
        0,
        "bytes of text that /tokenize and count_tokens take at most, and four times the token ids that /detokenize "
        "takes; more get 400. 0: 1 MiB, or 16 bytes for each token of the model's length if that is more",
        group="Model",
        ge=0,
        le=1_000_000_000,
    )
    prefill: tuple[str, ...] = setting(
        (),
        "control addresses of the prefill workers; none: decode workers do everything",
        group="Workers",
        pattern=_ADDRESS,
        expects="addresses such as tcp://127.0.0.1:7001",
        metavar="ADDRESS",
    )
    decode: tuple[str, ...] = setting(
        (),
        "control addresses of the decode workers",
        group="Workers",
        pattern=_ADDRESS,
        expects="at least one address such as tcp://127.0.0.1:7002",
        metavar="ADDRESS",
    )
    local_prefill_threshold: int = setting(
        64,
        "prompts with at most this many uncached tokens are prefilled on the decode worker itself",
        group="Workers",
        ge=0,
        le=1_000_000_000,
    )
    max_retries: int = setting(
        3,
        "how often a request may move to another worker without getting any further before it fails",
        group="Workers",
        ge=0,
        le=100,
    )
    max_inflight: int = setting(
        1024, "requests served at once; more get 503 with Retry-After", group="Workers", ge=1, le=1_000_000
    )
    worker_timeout_s: float = setting(
        1.0, "seconds without a sign of life after which a worker counts as dead", group="Deadlines", ge=0.05, le=600
    )
    queue_timeout_s: float = setting(
        30.0,
        "seconds a request may wait for a worker, its stream begun or not, before 503",
        group="Deadlines",
        ge=0.05,
        le=86400,
    )
    prefill_timeout_s: float = setting(
        120.0,
        "seconds without a first token of a placed request, and without a word of its worker that it makes progress "
        "(said once a second), after which it moves to others",
        group="Deadlines",
        ge=0.05,
        le=86400,
    )
    token_timeout_s: float = setting(
        60.0,
        "seconds between two tokens, and without such a word of a transfer, after which a request moves to others",
        group="Deadlines",
        ge=0.05,
        le=86400,
    )
    max_wait_s: float = setting(
        30.0,
        "seconds that a new request may be bound to wait behind others; one that would wait longer gets 429 at once. "
        "Batch clients are content to wait; for people set --slo-ttft-ms",
        group="Deadlines",
        ge=0.05,
        le=86400,
    )
    overload_wait_s: float = setting(
        0.5,
        "what --max-wait-s falls to once requests have been refused for seconds without a pause: as many are served "
        "through a short queue, and sooner. A few may always wait; set to the same as --max-wait-s it never falls",
        group="Deadlines",
        ge=0.05,
        le=86400,
    )
    drain_timeout_s: float = setting(
        30.0,
        "seconds that running answers get to finish after SIGTERM; at most 3 under `diptych serve`",
        group="Deadlines",
        ge=0,
        le=86400,
    )
    request_timeout_s: float = setting(
        600.0, "seconds a whole request may take before 504", group="Deadlines", ge=0.05, le=86400
    )

    def check(self) -> None:
        self.check_curve()
        if self.worker_timeout_s < 2 * self.heartbeat_s:
            raise ConfigError(
                "worker_timeout_s", self.worker_timeout_s, f"at least two heartbeats (2 x {self.heartbeat_s:g})"
            )
        addresses = (*self.prefill, *self.decode)
        for address in addresses:
            if addresses.count(address) > 1:
                raise ConfigError(
                    "decode" if address in self.decode else "prefill", address, "each worker address once"
                )
        self.check_discovery(addresses)
        self.check_access()

    def check_start(self) -> None:
        self.check_curve_start()
        if self.discovery != "static":
            self.check_discovery_start()
        elif not self.decode:
            raise ConfigError("decode", self.decode, "at least one address such as tcp://127.0.0.1:7002")
