"""Settings of the router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from common.config.cluster import DiscoverySettings
from common.config.common import CommonConfig
from common.config.field import AUTO, DURATION, FILE, HOST, PORT, TIMEOUT, Config, fields_of, setting
from common.config.request_class import EXPECTS, RequestClass, request_classes, with_batch
from common.config.scaling import PlannerSettings
from common.errors import ConfigError

MEMORY, OFF = "memory", "off"


@dataclass(frozen=True)
class AccessSettings(Config):
    """Keys, TLS, the audit log, and bounds on connections."""

    api_key_file: str = setting(
        "",
        "TOML file with API keys, their names and limits; read anew as it changes (`diptych api-key` makes an entry)",
        group="HTTP",
        **FILE,
    )
    tls_cert: str = setting(
        "",
        "PEM file with the certificate chain for https; read anew as it changes; empty: http",
        group="HTTP",
        **FILE,
    )
    tls_key: str = setting(
        "", "PEM file with the private key of --tls-cert, without a passphrase", group="HTTP", **FILE
    )
    audit_log: str = setting(
        "",
        "file (-: standard output) that gets a JSON line for each request that needs an API key: who, what, how much, "
        "how it ended; no prompts",
        group="HTTP",
        **FILE,
    )
    max_connections: int = setting(
        4096,
        "maximum open connections; one more evicts a connection that has been idle for 1 s, or gets 503",
        group="HTTP",
        ge=1,
        le=1_000_000,
    )
    header_timeout_s: float = setting(
        10.0, "seconds for a TLS handshake, and for the head of a request, to arrive", group="HTTP", ge=0.05, le=600
    )

    def check(self) -> None:
        super().check()
        for given, other, field in ((self.tls_cert, self.tls_key, "key"), (self.tls_key, self.tls_cert, "cert")):
            if given and not other:
                raise ConfigError(f"tls_{field}", "", "a file too when the other of --tls-cert and --tls-key is given")


@dataclass(frozen=True)
class StoreSettings(Config):
    """Where responses of the Responses API are kept, how many, and how long."""

    response_store: str = setting(
        AUTO,
        "SQLite file in which responses of /v1/responses are kept for previous_response_id, background and GET. auto: "
        "diptych/responses.sqlite3 under $XDG_STATE_HOME (~/.local/state), or in memory where that cannot be written; "
        "memory: until the router ends; off: nothing is kept",
        group="HTTP",
        pattern=r".+",
        expects="a file, auto, memory or off",
        metavar="FILE",
    )
    response_store_mib: int = setting(
        0,
        "MiB of stored responses, inputs included; above it, the key that has most loses its least recently used ones. "
        "0: 1024 in a file, 128 in memory",
        group="HTTP",
        ge=0,
        le=1_000_000,
    )
    response_store_hours: float = setting(
        720.0,
        "hours after which a stored response is deleted, counted from when it was made or a conversation last went on "
        "from it",
        group="HTTP",
        ge=0.01,
        le=876_000,
    )
    max_background: int = setting(
        64,
        "answers with background: true that are made at once; one key may have half of them; more get 429. Each counts "
        "towards --max-inflight too",
        group="HTTP",
        ge=1,
        le=100_000,
    )


@dataclass(frozen=True)
class FileSettings(Config):
    """How much of `/v1/files` is kept and how long, and how `/v1/batches` works. `response_store` says where."""

    file_store_mib: int = setting(
        0,
        "MiB of files, uploaded ones and results of batches, beside the store of responses (--response-store); a key "
        "may have half of it. More get 413. 0: 4096 in a file, 128 in memory",
        group="HTTP",
        ge=0,
        le=10_000_000,
    )
    file_store_hours: float = setting(
        720.0, "hours after which a file, or a batch that ended, is deleted", group="HTTP", ge=0.01, le=876_000
    )
    max_file_mib: int = setting(200, "MiB of an uploaded file; larger ones get 413", group="HTTP", ge=1, le=100_000)
    batch_concurrency: int = setting(
        16,
        "requests of batches that are answered at once, of all batches of this router. Each counts towards "
        "--max-inflight too",
        group="HTTP",
        ge=1,
        le=10_000,
    )


@dataclass(frozen=True)
class RouterConfig(CommonConfig, DiscoverySettings, PlannerSettings, AccessSettings, StoreSettings, FileSettings):
    """The router: HTTP in front, workers behind. It holds the tokeniser, never the weights."""

    section: ClassVar[str] = "router"
    env_prefix: ClassVar[str] = "ROUTER"
    about: ClassVar[str] = (
        "The OpenAI-compatible front door: sends each request to a prefill and a decode worker, streams the answer."
    )

    host: str = setting("127.0.0.1", "address the HTTP server listens on", group="HTTP", **HOST)
    port: int = setting(8000, "port the HTTP server listens on; 0 picks a free one", group="HTTP", **PORT)
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
    router_processes: int = setting(
        1,
        "processes that serve the port together, each a whole router with its share of connections, "
        "--max-connections, --max-inflight and --max-background; one that ends or hangs is started again",
        group="HTTP",
        ge=1,
        le=64,
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
    models_file: str = setting(
        "",
        "TOML file with all models to serve, in place of --model, with their aliases, fallbacks and limits, and with "
        "names that divide requests among models (docs/guides/operate.md)",
        group="Model",
        **FILE,
    )
    lora_file: str = setting(
        "",
        "TOML file with the LoRA adapters of the workers, read again when it changes (docs/guides/lora.md)",
        group="Model",
        **FILE,
    )
    reasoning: str = setting(
        "auto",
        "auto: an answer's text between <think> and </think> is sent as its reasoning, where the model's chat template "
        "has these marks; none: it is text like any other",
        group="Model",
        choices=("auto", "none"),
    )
    max_logprobs: int = setting(
        20,
        "alternatives to each token that a request may ask for; -1: as many as the vocabulary has, as a request with "
        "`logprobs: -1` wants them",
        group="Model",
        ge=-1,
        le=1_048_576,
    )
    tool_parser: str = setting(
        "auto",
        "form in which the model calls functions; auto: that of its chat template, or with a template without calls "
        "that of hermes, described in the prompt; none: calls stay text, and tool_choice cannot demand any",
        group="Model",
        choices=(
            *("auto", "hermes", "llama3", "mistral", "pythonic", "deepseek", "harmony"),
            *("qwen3-coder", "glm", "minimax", "seed-oss", "kimi", "none"),
        ),
    )
    local_prefill_threshold: int = setting(
        64,
        "prompts with at most this many uncached tokens are prefilled on the decode worker itself, longer ones on a "
        "prefill worker, unless the other is predicted to be clearly better; 0: never while a prefill worker is ready",
        group="Workers",
        ge=0,
        le=1_000_000_000,
    )
    routing_policy: str = setting(
        "diptych",
        "policy that chooses the workers of each request: diptych (least predicted time), random, round-robin, "
        "least-loaded (fewest requests), prefix-only (most cached tokens), or a class as module:Class "
        "(docs/contributing/add-a-routing-policy.md)",
        group="Workers",
        pattern=r"[a-z][a-z-]*|[A-Za-z_][\w.]*:[A-Za-z_]\w*",
        expects="the name of a policy, or module:Class",
        metavar="NAME",
    )
    balance_decode: bool = setting(
        True,
        "hand running answers over from a decode worker that runs out of KV blocks, or misses --slo-tpot-ms, to one "
        "that has room",
        group="Workers",
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
        **TIMEOUT,
    )
    prefill_timeout_s: float = setting(
        120.0,
        "seconds after which a placed request moves to other workers if it has no first token and its worker reports "
        "no progress, which workers do once a second",
        group="Deadlines",
        **TIMEOUT,
    )
    token_timeout_s: float = setting(
        60.0,
        "seconds after which a request moves to other workers if no further token comes and its worker reports no "
        "progress of a transfer",
        group="Deadlines",
        **TIMEOUT,
    )
    max_wait_s: float = setting(
        30.0,
        "seconds that a new request may have to wait behind others; one that would wait longer gets 429 at once. "
        "This suits batch clients; for people set --slo-ttft-ms",
        group="Deadlines",
        **TIMEOUT,
    )
    overload_wait_s: float = setting(
        0.5,
        "seconds that take the place of --max-wait-s once requests were refused for some seconds without a pause: a "
        "shorter queue serves as many requests, each sooner. A few requests may always wait; the value of --max-wait-s "
        "switches this off",
        group="Deadlines",
        **TIMEOUT,
    )
    role_change: bool = setting(
        False,
        "change running workers between prefill and decode where one pool is behind and the other is not; workers need "
        "--role-change, too",
        group="Scaling",
    )
    request_class: tuple[str, ...] = setting(
        (),
        "classes of requests, each with goals, a priority (-10 to 10, the highest first) and perhaps a share (share=3) "
        "by which classes of one priority divide tokens. A request names its class by header, field or API key; the "
        "class default has the goals of --slo-ttft-ms and --slo-tpot-ms",
        group="Scaling",
        expects=EXPECTS,
        metavar="PARTS",
    )
    drain_timeout_s: float = setting(
        30.0,
        "seconds that running answers get to finish after SIGTERM; at most 3 under `diptych serve`",
        group="Deadlines",
        **DURATION,
    )
    request_timeout_s: float = setting(
        600.0, "seconds a whole request may take before 504", group="Deadlines", **TIMEOUT
    )

    def check(self) -> None:
        super().check()
        self.check_silence("worker_timeout_s")
        request_classes(self.request_class, self.slo_ttft_ms, self.slo_tpot_ms)
        self._check_models()
        if self.planner == "kubernetes" and not (self.decode_deployment or self.models_file):
            raise ConfigError("decode_deployment", "", "the name of a Deployment with --planner kubernetes")

    def _check_models(self) -> None:
        if not self.models_file:
            return
        if self.served_model_name:
            raise ConfigError("served_model_name", self.served_model_name, "empty: --models-file names each model")
        default = next(field.default for field in fields_of(type(self)) if field.name == "model")
        if self.model != default:
            raise ConfigError("model", self.model, "left out with --models-file")

    def check_start(self) -> None:
        super().check_start()
        if self.task == "generate":
            self.check_workers("decode")
        if self.planner == "kubernetes":
            self.cluster.namespace(self.discovery_namespace, "discovery_namespace")

    @cached_property
    def classes(self) -> Mapping[str, RequestClass]:
        """The classes of requests by name; `default` is always there, and a class for lines of batches."""
        return with_batch(request_classes(self.request_class, self.slo_ttft_ms, self.slo_tpot_ms))
