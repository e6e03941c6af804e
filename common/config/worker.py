"""Settings that prefill and decode workers share."""

from __future__ import annotations

import ipaddress
import shlex
from dataclasses import dataclass

from common.config.cluster import PodSettings
from common.config.common import CommonConfig
from common.config.field import AUTO, DURATION, FILE, HOST, PORT, setting
from common.config.vllm import check_installed, check_nixl, check_vllm
from common.errors import ConfigError

CORES = r"([0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)?"
"""Regular expression of a list."""
BLOCK_SIZES = (16, 32, 64, 128)
CPU_BLOCK, GPU_BLOCK = 16, 64
"""Tokens. GPU attention reads one block table entry per tile of 64 keys."""
CPU_KV_GIB = 1.0
"""Default on a CPU: over 40,000 tokens of SmolLM2-135M in bfloat16."""
ADAPTER_NAME = r"[!-+\-.-<>-~]{1,256}"
_IDENTITY = r"[A-Za-z0-9_.:-]{0,128}"


def parse_cores(text: str) -> tuple[int, ...]:
    """Return the CPU numbers of a list such as "0-3,8". Raises ConfigError for a descending range."""
    cores: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise ConfigError("cores", text, "CPU numbers and ascending ranges, such as 0-3,8")
        cores.extend(range(int(first), int(last or first) + 1))
    return tuple(dict.fromkeys(cores))


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a socket bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class WorkerConfig(CommonConfig, PodSettings):
    """Settings that prefill and decode workers share."""

    host: str = setting("127.0.0.1", "address for the sockets of the worker", group="Sockets", common=True, **HOST)
    port: int = setting(
        0,
        "control port, which routers connect to; 0 picks a free port",
        group="Sockets",
        common=True,
        **PORT,
    )
    http_port: int = setting(0, "port of /health, /ready and /metrics; 0 picks a free port", group="Sockets", **PORT)
    advertise_host: str = setting(
        "",
        "host name that other processes use to reach this worker",
        group="Sockets",
        details="Set it when --host is a wildcard or an address inside a container.",
        default_note="the value of --host",
        common=True,
        metavar="HOST",
        **HOST | {"pattern": rf"({HOST['pattern']})?"},
    )
    allow_remote: bool = setting(
        False,
        "allow a --host other than loopback without --curve-key: connections are neither encrypted nor authenticated",
        group="Security",
    )
    address_file: str = setting(
        "",
        "write the bound addresses to this file as JSON",
        group="Sockets",
        internal=True,
        in_file=False,
        **FILE,
    )
    worker_id: str = setting(
        "",
        "name of this worker in logs and metrics",
        group="Configuration and logging",
        default_note="role, host and process ID",
        pattern=_IDENTITY,
        expects="up to 128 letters, digits and . _ : -",
        metavar="ID",
    )
    engine: str = setting(
        "diptych",
        "engine of workers",
        group="Model",
        details="`diptych` is Diptych's own. `vllm` requires the extra `vllm` and supports the architectures of vLLM "
        "(docs/guides/engines.md).",
        common=True,
        choices=("diptych", "vllm"),
    )
    engine_args: tuple[str, ...] = setting(
        (),
        "arguments of vLLM, quoted as in a shell; arguments after a bare -- are appended",
        group="Model",
        details="They override settings of Diptych that vLLM has too. Arguments that Diptych sets itself are rejected. "
        "`diptych serve` appends those of `--prefill-engine-args` or `--decode-engine-args` for one pool.",
        default_note="none",
        trailing=True,
        expects="arguments of vLLM, quoted as in a shell",
        metavar="ARGUMENTS",
    )
    dtype: str = setting(
        "auto",
        "number type of weights and activations",
        group="Model",
        details="`auto` is bfloat16 where the hardware supports it natively, otherwise float32.",
        choices=("auto", "float32", "bfloat16"),
    )
    quantization: str = setting(
        "auto",
        "format of weights in memory",
        group="Model",
        details="`none` keeps --dtype. `int8` and `int4` are for CPUs. `auto` keeps the format of a quantized "
        "checkpoint if there are kernels for it, otherwise converts it to int8 on a CPU; it does not "
        "quantize other models.",
        common=True,
        choices=("auto", "none", "int8", "int4"),
        metavar="FORMAT",
    )
    max_model_len: int = setting(
        0,
        "maximum tokens of a prompt and its answer together",
        group="Model",
        default_note="the model's context length",
        common=True,
        ge=0,
        le=1_000_000_000,
    )
    draft_head: str = setting(
        "",
        "draft head for speculative decoding: mtp for the head in the checkpoint, or the folder of an EAGLE head",
        group="Speculative decoding",
        details="EAGLE, EAGLE-2 and EAGLE-3 heads are supported. Tokens are drafted only where that saves time. "
        "All workers need the same value, because the head's KV is part of the model's KV blocks.",
        default_note="none",
        metavar="NAME",
    )
    lora: tuple[str, ...] = setting(
        (),
        "LoRA adapters to load at start, each as the requested model name and a folder in PEFT format",
        group="LoRA",
        pattern=rf"{ADAPTER_NAME}=[^,]{{1,1024}}",
        expects="NAME=PATH, each name once and without spaces, commas and =",
        metavar="NAME=PATH",
    )
    max_loras: int = setting(
        0,
        "maximum number of LoRA adapters of a worker",
        group="LoRA",
        details="If it exceeds the number of --lora, adapters can be loaded through the router at run time.",
        default_note="the number of --lora",
        ge=0,
        le=128,
    )
    # `kernels/native/lora.h` supports up to 512.
    max_lora_rank: int = setting(64, "maximum rank of a LoRA adapter", group="LoRA", ge=1, le=512)
    device: str = setting(
        AUTO,
        "device of the model: auto, cpu, cuda or cuda:N",
        group="Device",
        details="`auto` is a GPU that the kernels support, otherwise the CPU. The log gives the reason.",
        common=True,
        pattern=r"auto|cpu|cuda(:[0-9]+)?",
        expects="auto, cpu, cuda or cuda:N",
        metavar="DEVICE",
    )
    tensor_parallel_size: int = setting(
        1,
        "number of processes of one worker, each with a part of every layer",
        group="Device",
        details="On GPUs, each has its own GPU. Workers with different sizes can exchange KV.",
        common=True,
        ge=1,
        le=64,
    )
    rank_hosts: int = setting(
        1,
        "number of hosts that the processes of --tensor-parallel-size run on, with --engine vllm",
        group="Device",
        details="The other hosts run `diptych rank-host`.",
        ge=1,
        le=64,
    )
    rank_port: int = setting(0, "port that the other hosts of --rank-hosts connect to", group="Sockets", **PORT)
    batch_invariant: bool = setting(
        False,
        "compute the same bits for a sequence regardless of the other sequences in the batch",
        group="Device",
        details="It makes matrix products slower on a GPU, and always holds on a CPU. All workers need the same value.",
    )
    kernel_check: bool = setting(
        True,
        "compare every kernel with PyTorch at the model's shapes at start, and refuse to start if one differs",
        off="do not compare kernels with PyTorch at start",
        group="Device",
    )
    threads: int = setting(
        0,
        "number of CPU threads",
        group="Device",
        default_note="one per available core",
        ge=0,
        le=1024,
    )
    core_share: str = setting(
        "",
        "file through which the workers of one machine share CPU cores",
        group="Device",
        internal=True,
        **FILE,
    )
    weight_share: str = setting(
        "",
        "memory file through which the workers of one machine share weights on the CPU",
        group="Device",
        internal=True,
        **FILE,
    )
    cores: str = setting(
        "",
        "CPU cores to run on, such as 0-3,8",
        group="Device",
        default_note="all",
        pattern=CORES,
        expects="CPU numbers and ranges, such as 0-3,8",
        metavar="LIST",
    )
    block_size: int = setting(
        0,
        "tokens per KV block",
        group="KV cache",
        details="All workers need the same value.",
        default_note=f"{CPU_BLOCK} on a CPU, {GPU_BLOCK} on a GPU",
        choices=(0, *BLOCK_SIZES),
    )
    kv_memory_gib: float = setting(
        0.0,
        "size of the KV cache in GiB, per process of --tensor-parallel-size",
        group="KV cache",
        details="The default on a GPU is the part of --gpu-memory-utilization that weights and steps leave free. "
        "The GPU with the least free memory determines it for all processes.",
        default_note=f"{CPU_KV_GIB:g} on a CPU, the free memory on a GPU",
        common=True,
        ge=0,
        le=4096,
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "fraction of GPU memory to use",
        group="KV cache",
        details="It sizes the KV cache unless --kv-memory-gib or --num-blocks is set. `diptych serve` divides it "
        "among the workers of one GPU.",
        common=True,
        ge=0.05,
        le=1,
    )
    num_blocks: int = setting(
        0,
        "number of KV blocks",
        group="KV cache",
        default_note="as --kv-memory-gib allows",
        ge=0,
        le=1_000_000_000,
    )
    kv_cache_dtype: str = setting(
        "auto",
        "number type of the KV cache",
        group="KV cache",
        details="`native` is --dtype. `auto` is native, or fp8 if the checkpoint asks for it and has scales. "
        "`fp8` and `int8` are approximations of half the size of bfloat16; `int8` is more accurate, and "
        "for CPUs only. All workers need the same value.",
        choices=("auto", "native", "fp8", "int8"),
    )
    enable_prefix_caching: bool = setting(
        True,
        "reuse KV blocks of finished requests for prompts with the same prefix",
        off="do not reuse KV blocks for prompts with the same prefix",
        group="KV cache",
    )
    kv_host_gib: float = setting(
        0.0,
        "host memory for KV blocks that are evicted from the GPU, in GiB",
        group="KV cache",
        details="Prompts copy them back where that is faster than computing. Not for CPUs.",
        ge=0,
        le=65_536,
    )
    kv_disk_path: str = setting(
        "",
        "file for KV blocks that are evicted from memory, which survives a restart",
        group="KV cache",
        details="Prompts read them back where that is faster than computing. Each worker needs its own file; "
        "`diptych serve` appends the worker's name.",
        **FILE,
    )
    kv_disk_gib: float = setting(
        0.0, "size of the file of --kv-disk-path, in GiB", group="KV cache", ge=0, le=1_048_576
    )
    lend_port: int = setting(
        0,
        "port for workers that copy cached KV blocks from this one; 0 picks a free port",
        group="Sockets",
        **PORT,
    )
    kv_transport: str = setting(
        "auto",
        "transport of KV blocks between workers",
        group="KV transfer",
        details="`auto` is shared memory between workers of the same host and user, otherwise TCP. `shm` requires "
        "shared memory. With `nixl`, decode workers read blocks with NIXL (extra `nixl`), over "
        "RDMA where available. `cuda-ipc` copies between GPUs of one host. `nixl` and `cuda-ipc` fall "
        "back to `tcp`.",
        choices=("auto", "tcp", "shm", "nixl", "cuda-ipc"),
    )
    io_threads: int = setting(
        1,
        "threads for socket input, output and encryption",
        group="KV transfer",
        details="A connection uses one. More help with --kv-streams and with several workers at the other end.",
        ge=1,
        le=16,
    )
    max_waiting: int = setting(
        1024,
        "maximum requests in the queue of a worker; more are rejected",
        group="Scheduling",
        ge=1,
        le=1_000_000,
    )
    role_change: bool = setting(
        False,
        "let routers change this worker between prefill and decode without reloading the model",
        group="Autoscaling",
        details="The environment and the file of --config set the settings of the other role.",
    )
    router_timeout_s: float = setting(
        5.0,
        "seconds without a message from a router after which its requests are dropped",
        group="Timeouts",
        ge=0.05,
        le=600,
    )
    stall_timeout_s: float = setting(
        0.0,
        "seconds without progress after which the engine is considered stuck",
        group="Timeouts",
        details="The default is at least 3 s (20 s on a GPU) and at most 60 s.",
        default_note="20 times the duration of similar steps",
        ge=0,
        le=3600,
    )
    drain_timeout_s: float = setting(
        30.0,
        "seconds for running requests to finish or move to another worker after SIGTERM",
        group="Timeouts",
        details="Under `diptych serve` at most 2 s.",
        **DURATION,
    )

    def check(self) -> None:
        super().check()
        if not is_loopback(self.host) and not self.curve_key and not self.allow_remote:
            allowed = "127.0.0.1, ::1 or localhost unless --curve-key or --allow-remote is given"
            raise ConfigError("host", self.host, allowed)
        self.check_silence("router_timeout_s")
        if self.engine == "vllm":
            check_vllm(self)
        elif self.engine_args:
            raise ConfigError("engine_args", shlex.join(self.engine_args), "empty without --engine vllm")
        if self.on_gpu and self.quantization in ("int8", "int4"):
            raise ConfigError("quantization", self.quantization, f"auto or none on {self.device}")
        if self.kv_cache_dtype == "int8" and self.on_gpu:
            raise ConfigError("kv_cache_dtype", "int8", f"auto, native or fp8 on {self.device}")
        if self.kv_transport == "nixl" and self.curve_key:
            allowed = "auto, tcp or shm with --curve-key, because NIXL neither encrypts nor authenticates"
            raise ConfigError("kv_transport", "nixl", allowed)
        if self.exports_kv and (self.device == "cpu" or self.tensor_parallel_size > 1):
            allowed = "auto, tcp, shm or nixl on a CPU or with --tensor-parallel-size above 1"
            raise ConfigError("kv_transport", "cuda-ipc", allowed)
        parse_cores(self.cores)
        self._check_draft_head()
        self._check_tiers()
        self._check_adapters()
        self._check_rank_hosts()

    def check_start(self) -> None:
        super().check_start()
        if self.engine == "vllm":
            check_installed()
            if self.kv_transport == "nixl":
                check_nixl()

    def _check_tiers(self) -> None:
        if self.kv_host_gib and self.device == "cpu":
            allowed = "0 on a CPU; use --kv-memory-gib for a larger KV cache"
            raise ConfigError("kv_host_gib", self.kv_host_gib, allowed)
        if self.kv_host_gib and not self.enable_prefix_caching:
            raise ConfigError("kv_host_gib", self.kv_host_gib, "0 with --no-enable-prefix-caching")
        if bool(self.kv_disk_path) != (self.kv_disk_gib > 0):
            raise ConfigError("kv_disk_gib", self.kv_disk_gib, "above 0 with --kv-disk-path, and 0 without it")
        if self.kv_disk_gib and not self.enable_prefix_caching:
            raise ConfigError("kv_disk_gib", self.kv_disk_gib, "0 with --no-enable-prefix-caching")

    def _check_draft_head(self) -> None:
        """Reject settings that a draft head does not support."""
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
            raise ConfigError("lora", twice[0], "a name that is used once")
        if self.max_loras and len(names) > self.max_loras:
            raise ConfigError("max_loras", self.max_loras, f"0 or at least {len(names)}, the number of --lora")

    def _check_rank_hosts(self) -> None:
        """Check that each host has the same number of ranks and can reach the worker."""
        if self.rank_hosts > 1 and self.engine != "vllm":
            raise ConfigError("rank_hosts", self.rank_hosts, "1 without --engine vllm")
        if self.tensor_parallel_size % self.rank_hosts:
            size = self.tensor_parallel_size
            divisors = ", ".join(str(number) for number in range(1, size + 1) if not size % number)
            raise ConfigError("rank_hosts", self.rank_hosts, f"{divisors} with --tensor-parallel-size {size}")
        if (self.rank_hosts > 1) != (self.rank_port > 0):
            allowed = (
                f"1 or more with --rank-hosts {self.rank_hosts}" if self.rank_hosts > 1 else "0 without --rank-hosts"
            )
            raise ConfigError("rank_port", self.rank_port, allowed)

    @property
    def ranks_per_host(self) -> int:
        """Number of processes of this worker on each host."""
        return self.tensor_parallel_size // self.rank_hosts

    @property
    def lora_places(self) -> int:
        """Maximum number of adapters."""
        return self.max_loras or len(self.lora)

    @property
    def on_gpu(self) -> bool:
        """Whether the model runs on a GPU; false for `auto`."""
        return self.torch_device != "cpu"

    @property
    def torch_device(self) -> str:
        """The device for torch: the CPU for `auto`."""
        return "cpu" if self.device == AUTO else self.device

    @property
    def device_index(self) -> int:
        """Index of the GPU."""
        return int(self.device.partition(":")[2] or 0)

    def places_within(self, kv_tokens: int) -> int:
        """Return `places`, limited by a KV cache of `kv_tokens` tokens."""
        return self.places

    @property
    def block_tokens(self) -> int:
        """Tokens per KV block."""
        return self.block_size or (GPU_BLOCK if self.on_gpu else CPU_BLOCK)

    @property
    def kv_gib(self) -> float:
        """Size of the KV cache in GiB; 0 for the free memory of a GPU."""
        return self.kv_memory_gib or (0.0 if self.on_gpu else CPU_KV_GIB)

    @property
    def places(self) -> int:
        """Maximum number of concurrent requests."""
        return 0

    @property
    def step_tokens(self) -> int:
        """Maximum number of prompt tokens per step."""
        return 0

    @property
    def maps_memory(self) -> bool:
        """Whether KV uses shared memory where available."""
        return self.kv_transport in ("auto", "shm")

    @property
    def exports_kv(self) -> bool:
        """Whether other GPUs of the host may read this worker's KV cache."""
        return self.kv_transport == "cuda-ipc"

    @property
    def shares_kv(self) -> bool:
        """Whether this worker's KV cache is in shared memory."""
        return False
