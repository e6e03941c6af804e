"""Exchange between the router, which decides which models are loaded, and `diptych serve`, which runs their workers.

    router ── wanted.json ──> diptych serve ── report.json ──> router

Both are files in the private folder of the service, replaced atomically. They survive the restart of a router, which
adopts the workers that it finds.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TypeVar

import msgspec

from common.config import WorkerConfig
from common.machine import host_memory
from common.model_files import ModelSummary
from common.wire import Role

S = TypeVar("S", bound=msgspec.Struct)
BYTES_PER_GIB = 2**30
CPU_REST, GPU_REST = BYTES_PER_GIB // 4, BYTES_PER_GIB
"""Memory of a worker in addition to weights and KV cache."""
USED_SHARE = 0.9
"""Share of the available memory for models by default."""
LOOK_S = 0.1
"""Interval between two looks at a file of the exchange, in seconds."""
DTYPE_BYTES = 4
"""Maximum bytes of a number."""
QUANTISED_BYTES = {"int8": 1.1, "int4": 0.6}
"""Bytes per parameter of the formats of `--quantization`, with their scales."""
PLAIN = ("F32", "F16", "BF16", "float32", "float16", "bfloat16")
"""Types of weights that are not quantised."""


class WorkerMemory(msgspec.Struct, frozen=True):
    """Memory of one worker, in bytes: `kv_bytes`, or `kv_tokens` of any model if that is not 0, and `rest`.

    `parameter_bytes` is the maximum size of a parameter, 0 for the size in the model's files. A worker with
    `takes_all` uses all memory of its device.
    """

    kv_bytes: int = 0
    kv_tokens: int = 0
    parameter_bytes: float = 0.0
    rest: int = CPU_REST
    takes_all: bool = False

    @classmethod
    def of(cls, config: WorkerConfig) -> WorkerMemory:
        as_float = 4.0 if config.dtype == "float32" or (config.dtype == "auto" and not config.on_gpu) else 2.0
        return cls(
            kv_bytes=int(config.kv_gib * BYTES_PER_GIB),
            kv_tokens=config.num_blocks * config.block_tokens,
            parameter_bytes=QUANTISED_BYTES.get(config.quantization, as_float),
            rest=GPU_REST if config.on_gpu else CPU_REST,
            takes_all=config.on_gpu and not (config.kv_memory_gib or config.num_blocks),
        )

    def bytes_of(self, model: ModelSummary) -> float:
        """Return an upper estimate of the memory that a worker of this model uses; infinity if it takes all."""
        if self.takes_all:
            return math.inf
        is_quantised = model.quantisation not in PLAIN
        weights = model.num_bytes if is_quantised else model.num_parameters * self.parameter_bytes
        kv_bytes = self.kv_tokens * model.kv_numbers * DTYPE_BYTES if self.kv_tokens else self.kv_bytes
        return weights + kv_bytes + self.rest


def memory_budget(max_gib: float) -> int:
    """Return the bytes for models: `max_gib` GiB, or if that is 0, a share of the memory that is available now."""
    available = host_memory()
    usual = USED_SHARE * (available.num_bytes if available is not None else BYTES_PER_GIB)
    return int(max_gib * BYTES_PER_GIB or usual)


class ServiceSettings(msgspec.Struct, frozen=True):
    """Settings of `diptych serve` for the router.

    `models_dir` is a folder or "". `keep_s` is the default keep-alive, 0 for ever. `budget` is the memory for models,
    in bytes. Each model gets `num_prefill` and `num_decode` workers.
    """

    models_dir: str
    keep_s: float
    budget: int
    num_prefill: int
    num_decode: int
    prefill: WorkerMemory
    decode: WorkerMemory

    def roles(self, *, generates: bool, has_prefill: bool) -> dict[Role, int]:
        """Return the number of workers of a model by role."""
        prefill = self.num_prefill if has_prefill else 0
        return {"prefill": prefill, "decode": self.num_decode} if generates else {"prefill": prefill or 1, "decode": 0}

    def num_bytes(self, model: ModelSummary, roles: dict[Role, int]) -> int:
        """Return the memory that the workers of a model need. One that takes all of a device takes the budget."""
        need = roles["prefill"] * self.prefill.bytes_of(model) if roles["prefill"] else 0.0
        need += roles["decode"] * self.decode.bytes_of(model) if roles["decode"] else 0.0
        return self.budget if math.isinf(need) else math.ceil(need)


class WantedModel(msgspec.Struct, frozen=True):
    """A model that must have workers. `load` numbers its loads. `is_ready`: its workers have been ready."""

    model: str
    load: int
    roles: dict[Role, int]
    is_ready: bool = False


class Wanted(msgspec.Struct, frozen=True):
    """All models that must have workers."""

    models: tuple[WantedModel, ...] = ()


class ModelReport(msgspec.Struct, frozen=True):
    """Addresses of the workers of load `load` of a model, by role. There are none while the workers are being stopped.

    `failure` is the reason why the load failed. It is set when all workers have exited.
    """

    model: str
    load: int
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    failure: str = ""


class Report(msgspec.Struct, frozen=True):
    """The models that have workers, or whose last load failed."""

    models: tuple[ModelReport, ...] = ()


class OnDemandFolder:
    """The files of the exchange."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: dict[str, msgspec.Struct] = {}

    def settings(self) -> ServiceSettings:
        """Read the settings of the service. Raises OSError."""
        return msgspec.json.decode((self._folder / "settings.json").read_bytes(), type=ServiceSettings)

    def wanted(self) -> Wanted:
        return self._read("wanted.json", Wanted())

    def report(self) -> Report:
        return self._read("report.json", Report())

    def write_settings(self, settings: ServiceSettings) -> None:
        self._write("settings.json", settings)

    def write_wanted(self, wanted: Wanted) -> None:
        """Replace the file if its content changes. Raises OSError."""
        self._write("wanted.json", wanted)

    def write_report(self, report: Report) -> None:
        """Replace the file if its content changes. Raises OSError."""
        self._write("report.json", report)

    def _read(self, name: str, nothing: S) -> S:
        try:
            return msgspec.json.decode((self._folder / name).read_bytes(), type=type(nothing))
        except FileNotFoundError:
            return nothing

    def _write(self, name: str, content: msgspec.Struct) -> None:
        if self._written.get(name) == content:
            return
        new = self._folder / f"{name}.new"
        new.write_bytes(msgspec.json.encode(content))
        new.replace(self._folder / name)
        self._written[name] = content
