"""Settings of the router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from common.config.cluster import DiscoverySettings
from common.config.common import CommonConfig
from common.config.field import AUTO, DURATION, FILE, HOST, PORT, TIMEOUT, Config, fields_of, setting
from common.config.request_class import EXPECTS, OVERLOAD, REFUSALS, RequestClass, request_classes, with_batch
from common.config.scaling import PlannerSettings
from common.errors import ConfigError
from common.wire import Role

MEMORY, OFF = "memory", "off"


@dataclass(frozen=True)
class AccessSettings(Config):
    """API keys, TLS, the audit log and connection limits."""

    api_key_file: str = setting(
        "",
        "TOML file with API keys, their names and limits",
        group="Server",
        details="`diptych api-key` creates an entry. The file is reread when it changes.",
        **FILE,
    )
    tls_cert: str = setting(
        "",
        "PEM file with the TLS certificate chain; enables HTTPS",
        group="Server",
        details="It is reread when it changes.",
        **FILE,
    )
    tls_key: str = setting(
        "", "PEM file with the private key of --tls-cert, without a passphrase", group="Server", **FILE
    )
    audit_log: str = setting(
        "",
        "file for a JSON line per request with an API key; - for standard output",
        group="Server",
        details="A line has the key, endpoint, token counts and result, but no prompt.",
        **FILE,
    )
    allow_origin: tuple[str, ...] = setting(
        (),
        "origins of web pages that may read answers (CORS), such as https://app.example.com",
        group="Server",
        details="`*` allows every origin and requires API keys.",
        default_note="none",
        pattern=r"\*|[A-Za-z][A-Za-z0-9+.-]*://[^/?#@\s]+",
        expects="an origin such as https://app.example.com or http://localhost:3000, without a path, or *",
        metavar="ORIGIN",
    )
    max_connections: int = setting(
        4096,
        "maximum open connections",
        group="Server",
        details="Beyond it, a new connection replaces one that was idle for 1 s, or gets status 503.",
        ge=1,
        le=1_000_000,
    )
    header_timeout_s: float = setting(
        10.0,
        "maximum seconds for a TLS handshake and for the header of a request",
        group="Timeouts",
        ge=0.05,
        le=600,
    )

    def check(self) -> None:
        super().check()
        for given, other, field in ((self.tls_cert, self.tls_key, "key"), (self.tls_key, self.tls_cert, "cert")):
            if given and not other:
                raise ConfigError(f"tls_{field}", "", "a file, because --tls-cert and --tls-key belong together")


@dataclass(frozen=True)
class StoreSettings(Config):
    """Storage of the Responses API."""

    response_store: str = setting(
        AUTO,
        "SQLite file for responses of /v1/responses, files and batches: auto, memory, off or a path",
        group="Responses, files and batches",
        details="`auto` is diptych/responses.sqlite3 in $XDG_STATE_HOME (default ~/.local/state), or memory if "
        "that is not writable. `memory` lasts until the router exits. `off` stores nothing.",
        pattern=r".+",
        expects="a file, auto, memory or off",
        metavar="FILE",
    )
    response_store_mib: int = setting(
        0,
        "maximum size of stored responses and their inputs, in MiB",
        group="Responses, files and batches",
        details="Beyond it, the API key with the most data loses its least recently used responses.",
        default_note="1024 in a file, 128 in memory",
        ge=0,
        le=1_000_000,
    )
    response_store_hours: float = setting(
        720.0,
        "hours after its last use in a conversation after which a stored response is deleted",
        group="Responses, files and batches",
        ge=0.01,
        le=876_000,
    )
    max_background: int = setting(
        64,
        "maximum concurrent responses with background: true; more get status 429",
        group="Responses, files and batches",
        details="One API key may have half of them. Each counts towards --max-inflight.",
        ge=1,
        le=100_000,
    )


@dataclass(frozen=True)
class FileSettings(Config):
    """Storage of `/v1/files`, at the location of `response_store`, and concurrency of `/v1/batches`."""

    file_store_mib: int = setting(
        0,
        "maximum size of uploaded files and batch results, in MiB; more gets status 413",
        group="Responses, files and batches",
        details="One API key may use half of it.",
        default_note="4096 in a file, 128 in memory",
        ge=0,
        le=10_000_000,
    )
    file_store_hours: float = setting(
        720.0,
        "hours after which a file or a completed batch is deleted",
        group="Responses, files and batches",
        ge=0.01,
        le=876_000,
    )
    max_file_mib: int = setting(
        200,
        "maximum size of an uploaded file, in MiB; a larger one gets status 413",
        group="Responses, files and batches",
        ge=1,
        le=100_000,
    )
    batch_concurrency: int = setting(
        16,
        "maximum concurrent requests of all batches together",
        group="Responses, files and batches",
        details="Each counts towards --max-inflight.",
        ge=1,
        le=10_000,
    )


@dataclass(frozen=True)
class RouterConfig(CommonConfig, DiscoverySettings, PlannerSettings, AccessSettings, StoreSettings, FileSettings):
    """Settings of the router, which serves HTTP. It loads the tokenizer but no weights."""

    section: ClassVar[str] = "router"
    env_prefix: ClassVar[str] = "ROUTER"
    about: ClassVar[str] = (
        "Run the router: the OpenAI-compatible HTTP server that sends requests to prefill and decode workers."
    )
    examples: ClassVar[tuple[tuple[str, str], ...]] = (
        ("diptych router --prefill tcp://10.0.0.7:7001 --decode tcp://10.0.0.8:7002", ""),
        ("diptych router --discovery dns --decode-services diptych-decode:7002", ""),
        ("diptych router --discovery kubernetes --decode-services diptych-decode", ""),
    )

    host: str = setting("127.0.0.1", "address of the HTTP server", group="Server", common=True, **HOST)
    port: int = setting(8000, "HTTP port; 0 picks a free port", group="Server", common=True, **PORT)
    api_key: str = setting(
        "",
        "API key that clients must send as a bearer token",
        group="Server",
        details="Prefer the variable DIPTYCH_API_KEY, because other users can read command lines.",
        default_note="no authentication",
        common=True,
        secret=True,
        metavar="KEY",
    )
    max_body_bytes: int = setting(
        8 * 1024 * 1024,
        "maximum size of a request body, in bytes; a larger one gets status 413",
        group="Server",
        ge=1024,
        le=1_000_000_000,
    )
    router_processes: int = setting(
        1,
        "number of router processes that share the port",
        group="Server",
        details="They divide --max-connections, --max-inflight and --max-background among them. A process that "
        "exits or hangs is restarted.",
        ge=1,
        le=64,
    )
    keepalive_s: float = setting(
        15.0,
        "seconds without data after which a stream gets a keep-alive comment",
        group="Server",
        ge=0.01,
        le=300,
    )
    otlp_traces_endpoint: str = setting(
        "",
        "URL of an OTLP/HTTP collector for request traces",
        group="Server",
        details="Requires the extra `tracing`. The OTEL_* variables configure the rest.",
        default_note="no traces",
        pattern=r"(|https?://[^\s/]+(/\S*)?)",
        expects="a URL such as http://collector:4318/v1/traces",
        metavar="URL",
    )
    served_model_name: str = setting(
        "",
        "name in the API",
        group="Model",
        default_note="that of the model",
        common=True,
        metavar="NAME",
    )
    models_file: str = setting(
        "",
        "TOML file that lists several models to serve, in place of --model",
        group="Model",
        details="It also sets aliases, fallbacks, limits and splits. See docs/guides/serve-your-model.md.",
        **FILE,
    )
    on_demand_folder: str = setting(
        "",
        "folder through which the router asks `diptych serve` for the workers of models",
        group="Model",
        internal=True,
        in_file=False,
        metavar="FOLDER",
    )
    lora_file: str = setting(
        "",
        "TOML file that lists LoRA adapters for the workers to load",
        group="LoRA",
        details="It is reread when it changes. See docs/guides/lora.md.",
        **FILE,
    )
    chat_template: str = setting(
        "",
        "file with a Jinja chat template that replaces the model's templates",
        group="Model",
        default_note="the model's own",
        details="It must render a user message. It is read at start. See docs/guides/serve-your-model.md.",
        **FILE,
    )
    reasoning: str = setting(
        "auto",
        "handling of thoughts at the beginning of an answer",
        group="Model",
        details="`auto` returns them as reasoning if the chat template contains known marks such as </think>, `none` "
        "as text.",
        choices=("auto", "none"),
    )
    reasoning_start: str = setting(
        "",
        "text that begins a thought, in place of the mark detected in the chat template",
        group="Model",
        details="Requires --reasoning-end.",
    )
    reasoning_end: str = setting(
        "",
        "text that ends a thought, in place of the mark detected in the chat template",
        group="Model",
        details="Requires --reasoning-start.",
    )
    reasoning_in_form: bool = setting(
        False,
        "apply JSON schemas, other forms and required calls from the first token, so that the model cannot think first",
        group="Model",
        details="By default they apply to the answer after the thought.",
    )
    max_logprobs: int = setting(
        20,
        "maximum logprobs per token that a request may ask for; -1 allows the whole vocabulary",
        group="Model",
        ge=-1,
        le=1_048_576,
    )
    tool_parser: str = setting(
        "auto",
        "format of the model's tool calls",
        group="Model",
        details="`auto` selects the format of the chat template. If the template shows none, it uses hermes, describes "
        "that format in the prompt, and logs this at start. `none` leaves calls in the text and rejects a required "
        "tool_choice.",
        choices=(
            *("auto", "hermes", "llama3", "mistral", "pythonic", "deepseek", "deepseek-v3.2", "deepseek-v4", "harmony"),
            *("qwen3", "qwen3-coder", "glm", "glm4", "minimax", "seed-oss", "kimi", "solar", "exaone", "ernie"),
            *("granite", "granite4", "command", "internlm", "xlam", "phi4-mini", "gemma4", "functiongemma"),
            *("olmo3", "lfm2", "none"),
        ),
    )
    local_prefill_threshold: int = setting(
        64,
        "uncached prompt tokens up to which a decode worker computes a prompt itself",
        group="Routing",
        details="Longer prompts go to a prefill worker, unless the other choice is predicted to be clearly "
        "faster. `0` always uses a prefill worker if one is ready, and is the default of `diptych serve` "
        "with decode workers on GPUs.",
        ge=0,
        le=1_000_000_000,
    )
    routing_policy: str = setting(
        "diptych",
        "policy that selects the workers of a request",
        group="Routing",
        details="`diptych` minimizes the predicted latency. Others: `random`, `round-robin`, `least-loaded` "
        "(fewest requests), `prefix-only` (most cached tokens), or your own class (see "
        "docs/contributing/add-a-routing-policy.md).",
        pattern=r"[a-z][a-z-]*|[A-Za-z_][\w.]*:[A-Za-z_]\w*",
        expects="the name of a policy, or module:Class",
        metavar="NAME",
    )
    balance_decode: bool = setting(
        True,
        "move running requests from a decode worker without free KV blocks, or above --slo-tpot-ms, to another",
        off="do not move running requests between decode workers",
        group="Routing",
    )
    max_retries: int = setting(
        3,
        "maximum retries of a request on other workers without progress",
        group="Routing",
        ge=0,
        le=100,
    )
    max_inflight: int = setting(
        1024,
        "maximum concurrent requests; more get status 503 with Retry-After",
        group="Server",
        ge=1,
        le=1_000_000,
    )
    worker_timeout_s: float = setting(
        1.0,
        "seconds without a message after which a worker is considered dead",
        group="Timeouts",
        ge=0.05,
        le=600,
    )
    queue_timeout_s: float = setting(
        30.0,
        "maximum seconds that a request waits for a worker before status 503",
        group="Timeouts",
        **TIMEOUT,
    )
    prefill_timeout_s: float = setting(
        120.0,
        "seconds without a first token or reported progress after which a request moves to other workers",
        group="Timeouts",
        details="Workers report progress every second.",
        **TIMEOUT,
    )
    token_timeout_s: float = setting(
        60.0,
        "seconds without a further token after which a request moves to other workers",
        group="Timeouts",
        details="Progress of a KV transfer restarts the time.",
        **TIMEOUT,
    )
    max_wait_s: float = setting(
        30.0,
        "maximum predicted wait of a new request in the queue, in seconds; beyond it, status 429",
        group="Timeouts",
        details="It bounds the queue in an overload. --slo-refuse can refuse sooner.",
        **TIMEOUT,
    )
    overload_wait_s: float = setting(
        0.5,
        "value of --max-wait-s, in seconds, during sustained overload",
        group="Timeouts",
        details="It applies after several seconds of rejections: a shorter queue serves as much with less delay. "
        "A few requests may always wait. Set it to --max-wait-s to disable it.",
        **TIMEOUT,
    )
    role_change: bool = setting(
        False,
        "change running workers between prefill and decode to balance the pools",
        group="Autoscaling",
        details="Workers need --role-change too.",
    )
    slo_refuse: str = setting(
        OVERLOAD,
        "requests that get status 429",
        group="Goals",
        details="`overload` refuses those that would wait longer than --max-wait-s, `predicted` also those that are "
        "predicted to miss --slo-ttft-ms or --slo-tpot-ms.",
        choices=REFUSALS,
    )
    request_class: tuple[str, ...] = setting(
        (),
        "request classes with goals, a priority and optionally a share of tokens",
        group="Goals",
        details="Higher priorities (-10 to 10) go first. Classes of equal priority divide tokens by share "
        "(share=3). refuse=predicted refuses requests that are predicted to miss a goal. A request names its class in "
        "a header, a field or by its API key. The class default has the goals of --slo-ttft-ms and --slo-tpot-ms.",
        expects=EXPECTS,
        metavar="CLASS",
    )
    drain_timeout_s: float = setting(
        30.0,
        "seconds for running requests to finish after SIGTERM",
        group="Timeouts",
        details="New requests are served during the first half. Under `diptych serve` at most 3 s.",
        **DURATION,
    )
    request_timeout_s: float = setting(
        600.0,
        "maximum duration of a request, in seconds, before status 504",
        group="Timeouts",
        **TIMEOUT,
    )

    def check(self) -> None:
        super().check()
        self.check_silence("worker_timeout_s")
        request_classes(self.request_class, self.slo_ttft_ms, self.slo_tpot_ms, self.slo_refuse)
        self._check_models()
        if "*" in self.allow_origin and not (self.api_key or self.api_key_file):
            raise ConfigError("allow_origin", "*", "a list of origins without --api-key or --api-key-file")
        if bool(self.reasoning_start) != bool(self.reasoning_end):
            missing = "reasoning_end" if self.reasoning_start else "reasoning_start"
            raise ConfigError(missing, "", "a text, because --reasoning-start and --reasoning-end belong together")
        for name in ("reasoning_start", "reasoning_end"):
            if (mark := getattr(self, name)) != mark.strip():
                raise ConfigError(name, mark, "a text without white space at its ends")
        if self.planner == "kubernetes" and not (self.decode_deployment or self.models_file):
            raise ConfigError("decode_deployment", "", "the name of a Deployment with --planner kubernetes")

    def _check_models(self) -> None:
        if not self.models_file:
            return
        if self.served_model_name:
            raise ConfigError("served_model_name", self.served_model_name, "empty with --models-file")
        if self.chat_template:
            allowed = "empty with --models-file: set chat_template for each model in the file"
            raise ConfigError("chat_template", self.chat_template, allowed)
        default = next(field.default for field in fields_of(type(self)) if field.name == "model")
        if self.model != default:
            raise ConfigError("model", self.model, "omitted with --models-file")

    def check_workers(self, role: Role) -> None:
        if not self.on_demand_folder:
            super().check_workers(role)

    def check_start(self) -> None:
        super().check_start()
        if self.task == "generate":
            self.check_workers("decode")
        if self.planner == "kubernetes":
            self.cluster.namespace(self.discovery_namespace, "discovery_namespace")

    @cached_property
    def classes(self) -> Mapping[str, RequestClass]:
        """Request classes by name, including `default` and a class for batches."""
        return with_batch(request_classes(self.request_class, self.slo_ttft_ms, self.slo_tpot_ms, self.slo_refuse))
