"""Settings of prefill and decode workers alike."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from common.config.cluster import PodSettings
from common.config.common import CommonConfig
from common.config.field import AUTO, DURATION, FILE, HOST, PORT, setting
from common.errors import ConfigError

CORES = r"([0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)?"
"""A list, as a regular expression."""
BLOCK_SIZES = (16, 32, 64, 128)
CPU_BLOCK, GPU_BLOCK = 16, 64
"""Tokens: on a GPU a tile of keys is a block of 64, so attention reads one entry of the block table a tile."""
CPU_KV_GIB = 1.0
"""On a CPU, whose memory others need too: over 40,000 tokens of SmolLM2-135M in bfloat16."""
ADAPTER_NAME = r"[!-+\-.-<>-~]{1,256}"
_IDENTITY = r"[A-Za-z0-9_.:-]{0,128}"


def parse_cores(text: str) -> tuple[int, ...]:
    """CPU numbers of a list such as "0-3,8"; empty for "". Raises ConfigError for a range that runs backwards."""
    cores: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise ConfigError("cores", text, "CPU numbers and rising ranges, such as 0-3,8")
        cores.extend(range(int(first), int(last or first) + 1))
    return tuple(dict.fromkeys(cores))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a socket bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class WorkerConfig(CommonConfig, PodSettings):
    """Settings that prefill and decode workers share."""

    host: str = setting("127.0.0.1", "address the worker's sockets listen on", group="Sockets", **HOST)
    port: int = setting(
        0, "port of the control socket that routers connect to; 0 picks a free one", group="Sockets", **PORT
    )
    http_port: int = setting(0, "port of /health, /ready and /metrics; 0 picks a free one", group="Sockets", **PORT)
    advertise_host: str = setting(
        "",
        "host name that others reach this worker by, when it is not --host (a wildcard, a container)",
        group="Sockets",
        metavar="HOST",
        **HOST | {"pattern": rf"({HOST['pattern']})?"},
    )
    allow_remote: bool = setting(
        False,
        "let the sockets listen beyond this machine without --curve-key, neither encrypted nor authenticated",
        group="Sockets",
    )
    address_file: str = setting(
        "",
        "write the bound addresses to this file as JSON, for the program that started the worker",
        group="Sockets",
        in_file=False,
        **FILE,
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
        "number type of weights, and of KV unless --kv-cache-dtype says otherwise; auto: bfloat16 where the hardware "
        "computes it natively, else float32",
        group="Model",
        choices=("auto", "float32", "bfloat16"),
    )
    quantization: str = setting(
        "auto",
        "how weights are kept in memory: none (the dtype), on a CPU int8 or int4, or auto (of a quantised model as its "
        "file holds them where there are kernels for that, else int8 on a CPU; of others none)",
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
    draft_head: str = setting(
        "",
        "a head that reads the model's hidden states and drafts tokens where that pays: mtp, the one in the model's "
        "own checkpoint, or the folder of an EAGLE, EAGLE-2 or EAGLE-3 head; its KV lies in the model's blocks, so all "
        "workers need the same; empty: none",
        group="Model",
        metavar="NAME",
    )
    lora: tuple[str, ...] = setting(
        (),
        "LoRA adapters to load at the start: a folder in PEFT's layout, under the name that requests give as model",
        group="Model",
        pattern=rf"{ADAPTER_NAME}=[^,]{{1,1024}}",
        expects="NAME=PATH, each name once and without spaces, commas and =",
        metavar="NAME=PATH",
    )
    max_loras: int = setting(
        0,
        "LoRA adapters that a worker may hold at a time; 0: as many as --lora names. More than those can be loaded and "
        "unloaded at the router while it serves",
        group="Model",
        ge=0,
        le=128,
    )
    # `kernels/native/lora.h` has room for 512.
    max_lora_rank: int = setting(64, "largest rank of a LoRA adapter", group="Model", ge=1, le=512)
    device: str = setting(
        AUTO,
        "where the model runs; auto: a GPU, or the CPU if torch finds no GPU that the kernels support; the log "
        "says which, and why",
        group="Device",
        pattern=r"auto|cpu|cuda(:[0-9]+)?",
        expects="auto, cpu, cuda or cuda:N",
        metavar="DEVICE",
    )
    tensor_parallel_size: int = setting(
        1,
        "processes that one worker is made of, each with a part of every layer. Workers with different numbers of them "
        "exchange KV",
        group="Device",
        ge=1,
        le=64,
    )
    rank_hosts: int = setting(
        1,
        "hosts that the ranks of --tensor-parallel-size are on, this one included; the others run `diptych rank-host`",
        group="Device",
        ge=1,
        le=64,
    )
    rank_port: int = setting(
        0, "port at --host that other hosts of this worker's ranks connect to", group="Sockets", **PORT
    )
    batch_invariant: bool = setting(
        False,
        "compute each row of a step to the same bits whatever shares the step with it; on a GPU this makes matrix "
        "products slower, on a CPU it is so already. The same on every worker",
        group="Device",
    )
    kernel_check: bool = setting(
        True,
        "compare every kernel with plain torch at the model's own shapes before this worker is ready, and refuse to "
        "start where one differs",
        group="Device",
    )
    threads: int = setting(
        0, "CPU threads for computing; 0: one for each core this process may use", group="Device", ge=0, le=1024
    )
    core_share: str = setting(
        "",
        "file through which workers of one machine see which of them compute: a worker that computes alone uses all "
        "its threads, others a part; `diptych serve` sets it",
        group="Device",
    )
    cores: str = setting(
        "",
        "CPU cores to stay on, such as 0-3,8; empty: all",
        group="Device",
        pattern=CORES,
        expects="CPU numbers and ranges, such as 0-3,8",
        metavar="LIST",
    )
    block_size: int = setting(
        0,
        f"tokens in a KV block; the same on every worker; 0: {CPU_BLOCK}, on a GPU {GPU_BLOCK}",
        group="KV cache",
        choices=(0, *BLOCK_SIZES),
    )
    kv_memory_gib: float = setting(
        0.0,
        f"GiB of memory for KV blocks, of each rank; 0: {CPU_KV_GIB:g}, on a GPU what --gpu-memory-utilization leaves "
        "beside weights and steps, on the fullest of all ranks' GPUs",
        group="KV cache",
        ge=0,
        le=4096,
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "share of a GPU's memory that this worker may use, weights and steps included: it sizes the KV cache where "
        "neither --kv-memory-gib nor --num-blocks does; `diptych serve` divides it among the workers of one GPU",
        group="KV cache",
        ge=0.05,
        le=1,
    )
    num_blocks: int = setting(
        0, "number of KV blocks; 0: as many as --kv-memory-gib holds", group="KV cache", ge=0, le=1_000_000_000
    )
    kv_cache_dtype: str = setting(
        "auto",
        "number type of the KV cache: native is --dtype's; auto too, but fp8 where the checkpoint asks for it and has "
        "scales; fp8 and int8 are about half of bfloat16, a quarter of float32, and approximations; int8 is the closer "
        "one, and for CPUs alone. The same on every worker",
        group="KV cache",
        choices=("auto", "native", "fp8", "int8"),
    )
    enable_prefix_caching: bool = setting(
        True, "keep finished blocks and reuse them for equal prefixes", group="KV cache"
    )
    kv_host_gib: float = setting(
        0.0,
        "GiB of host memory for KV blocks that leave a GPU's: prompts copy them back instead of computing them where "
        "that is faster; on a CPU the cache is in host memory already",
        group="KV cache",
        ge=0,
        le=65_536,
    )
    kv_disk_path: str = setting(
        "",
        "file in which KV blocks outlive memory and the worker: prompts read them instead of computing them where that "
        "is faster. Each worker needs its own; `diptych serve` puts the worker's name behind it",
        group="KV cache",
        **FILE,
    )
    kv_disk_gib: float = setting(0.0, "GiB of the file at --kv-disk-path", group="KV cache", ge=0, le=1_048_576)
    lend_port: int = setting(
        0, "port that workers which pull cached blocks connect to; 0 picks a free one", group="Sockets", **PORT
    )
    kv_transport: str = setting(
        "auto",
        "how KV blocks travel; auto: through shared memory between workers of one host and user, else over TCP; "
        "shm: refuse a worker that cannot share; nixl: decode workers read them with NIXL, by RDMA where the network "
        "has it, and over TCP where one side has no NIXL (pip install nixl); cuda-ipc: GPUs copy them "
        "from another GPU of the host, and over TCP where they cannot reach it",
        group="Transfer",
        choices=("auto", "tcp", "shm", "nixl", "cuda-ipc"),
    )
    io_threads: int = setting(
        1,
        "threads that read and write sockets and, with --curve-key, encrypt; a connection stays with one, so several "
        "help with --kv-streams and with several workers at the other end",
        group="Transfer",
        ge=1,
        le=16,
    )
    max_waiting: int = setting(
        1024, "requests that may wait here; more are refused", group="Scheduling", ge=1, le=1_000_000
    )
    role_change: bool = setting(
        False,
        "let routers change this worker between prefill and decode while it runs, without loading the model again; "
        "settings of the other role come from the environment and from --config",
        group="Scheduling",
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
        **DURATION,
    )

    def check(self) -> None:
        super().check()
        if not is_loopback(self.host) and not self.curve_key and not self.allow_remote:
            allowed = "127.0.0.1, ::1 or localhost unless --curve-key or --allow-remote is given"
            raise ConfigError("host", self.host, allowed)
        self.check_silence("router_timeout_s")
        if self.on_gpu and self.quantization in ("int8", "int4"):
            raise ConfigError("quantization", self.quantization, f"auto or none on {self.device}")
        if self.kv_cache_dtype == "int8" and self.on_gpu:
            raise ConfigError("kv_cache_dtype", "int8", f"auto, native or fp8 on {self.device}")
        if self.kv_transport == "nixl" and self.curve_key:
            allowed = "auto, tcp or shm with --curve-key: NIXL neither encrypts KV nor asks who reads it"
            raise ConfigError("kv_transport", "nixl", allowed)
        if self.exports_kv and (self.device == "cpu" or self.tensor_parallel_size > 1):
            allowed = "auto, tcp, shm or nixl on CPUs and with several ranks: a GPU copies out of another's whole cache"
            raise ConfigError("kv_transport", "cuda-ipc", allowed)
        parse_cores(self.cores)
        self._check_draft_head()
        self._check_tiers()
        self._check_adapters()
        self._check_rank_hosts()

    def _check_tiers(self) -> None:
        if self.kv_host_gib and self.device == "cpu":
            allowed = "0 on cpu: its KV cache is in host memory; for a larger one give --kv-memory-gib or --num-blocks"
            raise ConfigError("kv_host_gib", self.kv_host_gib, allowed)
        if self.kv_host_gib and not self.enable_prefix_caching:
            raise ConfigError("kv_host_gib", self.kv_host_gib, "0 without prefix caching: it holds cached blocks")
        if bool(self.kv_disk_path) != (self.kv_disk_gib > 0):
            raise ConfigError("kv_disk_gib", self.kv_disk_gib, "above 0 with --kv-disk-path, and 0 without")
        if self.kv_disk_gib and not self.enable_prefix_caching:
            raise ConfigError("kv_disk_gib", self.kv_disk_gib, "0 without prefix caching: it holds cached blocks")

    def _check_draft_head(self) -> None:
        """Refuse settings that are not served with a draft head."""
        others = (
            (self.tensor_parallel_size > 1, f"--tensor-parallel-size {self.tensor_parallel_size}"),
            (self.lora_places > 0, "LoRA adapters"),
            (self.batch_invariant and self.on_gpu, f"--batch-invariant on {self.device}"),
        )
        for is_given, other in others:
            if is_given and self.draft_head:
                raise ConfigError("draft_head", self.draft_head, f"empty with {other}")

    def _check_adapters(self) -> None:
        names = [one.partition("=")[0] for one in self.lora]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError("lora", twice[0], "each name once")
        if self.max_loras and len(names) > self.max_loras:
            raise ConfigError("max_loras", self.max_loras, f"0, or at least the {len(names)} of --lora")

    def _check_rank_hosts(self) -> None:
        """That each host has as many ranks, and finds rank 0."""
        if self.tensor_parallel_size % self.rank_hosts:
            size = self.tensor_parallel_size
            divisors = ", ".join(str(number) for number in range(1, size + 1) if not size % number)
            raise ConfigError("rank_hosts", self.rank_hosts, f"{divisors} with --tensor-parallel-size {size}")
        if (self.rank_hosts > 1) != (self.rank_port > 0):
            allowed = f"from 1 with --rank-hosts {self.rank_hosts}" if self.rank_hosts > 1 else "0 without --rank-hosts"
            raise ConfigError("rank_port", self.rank_port, allowed)

    @property
    def ranks_per_host(self) -> int:
        """Processes of this worker on each of its hosts."""
        return self.tensor_parallel_size // self.rank_hosts

    @property
    def lora_places(self) -> int:
        """How many adapters it holds at most."""
        return self.max_loras or len(self.lora)

    @property
    def on_gpu(self) -> bool:
        """Whether the model runs on a GPU. False for `auto`."""
        return self.torch_device != "cpu"

    @property
    def torch_device(self) -> str:
        """The device's name in torch. `auto` means the CPU until it is replaced."""
        return "cpu" if self.device == AUTO else self.device

    @property
    def device_index(self) -> int:
        """Which GPU of its host it is on."""
        return int(self.device.partition(":")[2] or 0)

    def places_within(self, kv_tokens: int) -> int:
        """`places`, bounded by a KV cache of `kv_tokens` tokens."""
        return self.places

    @property
    def block_tokens(self) -> int:
        """Tokens in a KV block."""
        return self.block_size or (GPU_BLOCK if self.on_gpu else CPU_BLOCK)

    @property
    def kv_gib(self) -> float:
        """GiB of memory for KV blocks; 0: as many as a GPU has left."""
        return self.kv_memory_gib or (0.0 if self.on_gpu else CPU_KV_GIB)

    @property
    def places(self) -> int:
        """Requests that it computes side by side at most."""
        return 0

    @property
    def step_tokens(self) -> int:
        """Prompt tokens that a step of it computes at most."""
        return 0

    @property
    def maps_memory(self) -> bool:
        """Whether KV goes through shared memory where that works."""
        return self.kv_transport in ("auto", "shm")

    @property
    def exports_kv(self) -> bool:
        """Whether this worker's KV cache is in memory of a GPU that other GPUs of the host may read."""
        return self.kv_transport == "cuda-ipc"

    @property
    def shares_kv(self) -> bool:
        """Whether this worker's KV cache is for others to read."""
        return False
