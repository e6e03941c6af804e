"""Every setting of every Diptych process. docs/configuration.md lists them; a test compares the two."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import ClassVar

from diptych.common.access_settings import AccessSettings
from diptych.common.cluster_settings import DiscoverySettings, PodSettings
from diptych.common.config_field import Config, setting
from diptych.common.curve_settings import CurveSettings
from diptych.common.errors import ConfigError

_ADDRESS = r"(tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}|ipc://.+)"
_CORES = r"([0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)?"
_HOST = r"[A-Za-z0-9_.:-]+"
_IDENTITY = r"[A-Za-z0-9_.:-]{0,128}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a socket bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_cores(text: str) -> tuple[int, ...]:
    """CPU numbers of a list such as "0-3,8"; empty for "". Raises ConfigError for a range that runs backwards."""
    cores: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise ConfigError("cores", text, "CPU numbers and rising ranges, such as 0-3,8")
        cores.extend(range(int(first), int(last or first) + 1))
    return tuple(dict.fromkeys(cores))


@dataclass(frozen=True)
class CommonConfig(CurveSettings):
    """What every process takes."""

    config: str = setting(
        "",
        "TOML file with settings; flags and environment win over it",
        group="Everywhere",
        metavar="FILE",
        in_file=False,
    )
    log_level: str = setting(
        "info", "how much to log", group="Everywhere", choices=("debug", "info", "warning", "error")
    )
    log_json: bool = setting(False, "log one JSON object a line instead of text for people", group="Everywhere")
    model: str = setting(
        "smollm2-135m",
        "built-in name (smollm2-135m, gemma3-270m), folder, .gguf file or Hugging Face id",
        group="Model",
        pattern=r".+",
        expects="a model name, folder or file",
        metavar="NAME",
    )
    heartbeat_s: float = setting(
        0.25,
        "seconds between the signs of life that router and workers send each other",
        group="Deadlines",
        ge=0.01,
        le=10,
    )


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
        pattern=_HOST,
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
    served_model_name: str = setting(
        "", "name that clients use for the model; empty: the model's own name", group="Model", metavar="NAME"
    )
    tokenizer_threads: int = setting(
        2, "threads that tokenise prompts, beside the event loop", group="Model", ge=1, le=64
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
        "seconds from a request's arrival on its workers to its first token, after which it moves to others",
        group="Deadlines",
        ge=0.05,
        le=86400,
    )
    token_timeout_s: float = setting(
        60.0,
        "seconds between two tokens, a transfer included, after which a request moves to other workers",
        group="Deadlines",
        ge=0.05,
        le=86400,
    )
    max_wait_s: float = setting(
        30.0,
        "seconds that a new request may be bound to wait behind others; one that would wait longer gets 429 at once",
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


@dataclass(frozen=True)
class WorkerConfig(CommonConfig, PodSettings):
    """What both kinds of worker take."""

    host: str = setting(
        "127.0.0.1",
        "address the worker's sockets listen on",
        group="Sockets",
        pattern=_HOST,
        expects="a host name or IP address",
    )
    port: int = setting(
        0, "port of the control socket that routers connect to; 0 picks a free one", group="Sockets", ge=0, le=65535
    )
    http_port: int = setting(
        0, "port of /health, /ready and /metrics; 0 picks a free one", group="Sockets", ge=0, le=65535
    )
    advertise_host: str = setting(
        "",
        "host name that others reach this worker by, when it is not --host (a wildcard, a container)",
        group="Sockets",
        pattern=rf"({_HOST})?",
        expects="a host name or IP address",
        metavar="HOST",
    )
    allow_remote: bool = setting(
        False,
        "let the sockets listen beyond this machine without --curve-key, neither encrypted nor authenticated",
        group="Sockets",
    )
    address_file: str = setting(
        "",
        "write the bound addresses to this file as JSON, for whoever started the worker",
        group="Sockets",
        metavar="FILE",
        in_file=False,
    )
    worker_id: str = setting(
        "",
        "name of this worker in logs and metrics; empty: role, host and process id",
        group="Everywhere",
        pattern=_IDENTITY,
        expects="up to 128 letters, digits and . _ : -",
        metavar="ID",
    )
    dtype: str = setting(
        "auto",
        "number type of weights and KV; auto: bfloat16 where the hardware computes it natively, else float32",
        group="Model",
        choices=("auto", "float32", "bfloat16"),
    )
    quantization: str = setting(
        "none",
        "how weights are kept in memory on a CPU: none (the dtype), int8, int4, or auto (as a GGUF file holds them)",
        group="Model",
        choices=("none", "int8", "int4", "auto"),
    )
    max_model_len: int = setting(
        0,
        "longest prompt plus answer in tokens; 0: what the model was trained for",
        group="Model",
        ge=0,
        le=1_000_000_000,
    )
    device: str = setting(
        "cpu",
        "where the model runs",
        group="Device",
        pattern=r"cpu|cuda(:[0-9]+)?",
        expects="cpu, cuda or cuda:N",
        metavar="DEVICE",
    )
    threads: int = setting(
        0, "CPU threads for computing; 0: one for each core this process may use", group="Device", ge=0, le=1024
    )
    core_share: str = setting(
        "",
        "file through which workers of one machine tell each other that they compute: whoever computes alone uses all "
        "its threads, others a part; `diptych serve` sets it",
        group="Device",
    )
    cores: str = setting(
        "",
        "CPU cores to stay on, such as 0-3,8; empty: all",
        group="Device",
        pattern=_CORES,
        expects="CPU numbers and ranges, such as 0-3,8",
        metavar="LIST",
    )
    block_size: int = setting(
        16, "tokens in a KV block; the same on every worker", group="KV cache", choices=(16, 32, 64, 128)
    )
    kv_memory_gib: float = setting(1.0, "GiB of memory for KV blocks", group="KV cache", ge=0.001, le=4096)
    num_blocks: int = setting(
        0, "number of KV blocks; 0: as many as --kv-memory-gib holds", group="KV cache", ge=0, le=1_000_000_000
    )
    enable_prefix_caching: bool = setting(
        True, "keep finished blocks and reuse them for equal prefixes", group="KV cache"
    )
    kv_transport: str = setting(
        "auto",
        "how KV blocks travel; auto: through shared memory between workers of one host and user, else over TCP; "
        "shm: refuse a worker that cannot share",
        group="Transfer",
        choices=("auto", "tcp", "shm"),
    )
    max_waiting: int = setting(
        1024, "requests that may wait here; more are refused", group="Scheduling", ge=1, le=1_000_000
    )
    router_timeout_s: float = setting(
        5.0,
        "seconds without a sign of life after which a router's requests are dropped",
        group="Deadlines",
        ge=0.05,
        le=600,
    )
    stall_timeout_s: float = setting(
        0.0,
        "seconds without progress after which the engine counts as stuck; 0: twenty times what steps of the same size "
        "took, from 3 (20 on a GPU) to 60",
        group="Deadlines",
        ge=0,
        le=3600,
    )

    drain_timeout_s: float = setting(
        30.0,
        "seconds that running requests get to finish, or to move to another worker, after SIGTERM; at most 2 under "
        "`diptych serve`",
        group="Deadlines",
        ge=0,
        le=86400,
    )

    def check(self) -> None:
        self.check_curve()
        if not is_loopback(self.host) and not self.curve_key and not self.allow_remote:
            allowed = "127.0.0.1, ::1 or localhost unless --curve-key or --allow-remote is given"
            raise ConfigError("host", self.host, allowed)
        if self.router_timeout_s < 2 * self.heartbeat_s:
            raise ConfigError(
                "router_timeout_s", self.router_timeout_s, f"at least two heartbeats (2 x {self.heartbeat_s:g})"
            )
        if self.kv_transport == "shm" and self.device != "cpu":
            raise ConfigError("kv_transport", "shm", f"auto or tcp on {self.device}: its blocks are not in host memory")
        parse_cores(self.cores)

    def check_start(self) -> None:
        self.check_curve_start()
        self.check_pod_start()

    @property
    def shares_kv(self) -> bool:
        """Whether this worker's KV cache is for others to read."""
        return False


@dataclass(frozen=True)
class PrefillWorkerConfig(WorkerConfig):
    """A prefill worker: computes the KV cache of prompts and ships it."""

    section: ClassVar[str] = "prefill_worker"
    env_prefix: ClassVar[str] = "PREFILL"
    about: ClassVar[str] = (
        "Computes the KV cache of prompts in chunks, ships it to decode workers and samples the first token."
    )

    max_num_batched_tokens: int = setting(
        512, "prompt tokens computed in one step, over all requests", group="Scheduling", ge=1, le=1_000_000
    )
    max_num_seqs: int = setting(32, "requests computed side by side", group="Scheduling", ge=1, le=4096)
    kv_streams: int = setting(
        1, "parallel connections to each decode worker for KV blocks", group="Transfer", ge=1, le=16
    )
    kv_lease_s: float = setting(
        30.0, "seconds that KV is kept for a decode worker that says nothing", group="Transfer", ge=0.05, le=3600
    )

    @property
    def shares_kv(self) -> bool:
        return self.kv_transport != "tcp"


@dataclass(frozen=True)
class DecodeWorkerConfig(WorkerConfig):
    """A decode worker: receives KV and generates tokens."""

    section: ClassVar[str] = "decode_worker"
    env_prefix: ClassVar[str] = "DECODE"
    about: ClassVar[str] = "Receives the KV cache of prompts and generates tokens; computes short prompts itself."

    slo_tpot_ms: float = setting(
        0.0,
        "milliseconds that a token after the first should take, for diptych_decode_pressure; 0: no such goal",
        group="Scaling",
        ge=0,
        le=3.6e6,
    )
    cuda_graphs: bool = setting(
        True, "record decode steps as CUDA graphs at start and launch each as a whole; only on cuda", group="Device"
    )
    kv_port: int = setting(0, "port that KV blocks arrive on; 0 picks a free one", group="Sockets", ge=0, le=65535)
    max_num_seqs: int = setting(64, "requests generated side by side", group="Scheduling", ge=1, le=4096)
    local_prefill_chunk: int = setting(
        128,
        "prompt tokens computed between two decode steps when this worker prefills itself",
        group="Scheduling",
        ge=1,
        le=1_000_000,
    )
    watermark: float = setting(
        0.02,
        "share of the KV blocks that stays free for running requests when new ones come in",
        group="KV cache",
        ge=0,
        le=0.5,
    )
    grant_timeout_s: float = setting(
        30.0, "seconds a prompt may wait here for free KV blocks", group="Transfer", ge=0.05, le=3600
    )
    transfer_timeout_s: float = setting(
        30.0,
        "seconds between two arriving KV frames after which a transfer has failed",
        group="Transfer",
        ge=0.05,
        le=3600,
    )
    handover_timeout_s: float = setting(
        10.0,
        "seconds that handing a running answer over to another decode worker may take before it goes on here",
        group="Transfer",
        ge=0.05,
        le=3600,
    )

    @property
    def shares_kv(self) -> bool:
        return self.kv_transport != "tcp" and self.device == "cpu"


@dataclass(frozen=True)
class ServeConfig(Config):
    """One machine: how many of each worker. All else is a setting of the router or of the workers."""

    section: ClassVar[str] = "serve"
    env_prefix: ClassVar[str] = "SERVE"
    about: ClassVar[str] = (
        "A whole service on this machine: fetches the model, starts the workers and a router, restarts what dies."
    )

    prefill: int = setting(1, "prefill workers to start; 0: decode workers do everything", group="Workers", ge=0, le=64)
    decode: int = setting(1, "decode workers to start", group="Workers", ge=1, le=64)


CONFIG_CLASSES: tuple[type[Config], ...] = (ServeConfig, RouterConfig, PrefillWorkerConfig, DecodeWorkerConfig)
