"""Our served model: what both roles of a worker share, and keep in a role change."""

from __future__ import annotations

import ctypes
import gc
import logging
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import torch

from common.config import WorkerConfig
from common.engine.adapters import AdapterBank
from common.engine.run import LoadedModel
from common.engine.worker.contract import ModelFacts
from common.engine.worker.loop import EngineLoop
from common.engine.worker.metrics import WorkerMetrics
from common.engine.worker.step_times import DEVICE_FLOOR_S, FLOOR_S, StepTimes
from common.errors import ModelError
from common.grammar import Grammars
from common.latency import StepFit
from common.machine import CoreShare
from common.model_files import ModelFiles
from common.wire import Role
from kernels import too_large

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoopModel:
    """A loaded model with its compiled grammars and the step times of this worker.

    The step time model is kept per role, because steps of one role say little about the other. Routers use the pool's
    model until a worker has its own.
    """

    files: ModelFiles
    loaded: LoadedModel
    grammars: Grammars
    facts: ModelFacts
    step_times: StepTimes
    """In all roles."""
    step_fits: dict[Role, StepFit] = field(default_factory=lambda: defaultdict(StepFit))

    @classmethod
    def load(cls, files: ModelFiles, config: WorkerConfig) -> LoopModel:
        """Load the model, in several ranks if configured.

        Raises ModelError (also if the model does not fit) or ConfigError.
        """
        try:
            if config.tensor_parallel_size > 1:
                from common.engine.ranks import load_ranked

                loaded = load_ranked(files, config)
            else:
                loaded = LoadedModel.load(files, config)
        except Exception as error:
            if problem := too_large(error):
                raise ModelError(f"{problem}; --device cpu runs without a GPU") from error
            raise
        return cls.of(files, loaded, config)

    @classmethod
    def of(cls, files: ModelFiles, loaded: LoadedModel, config: WorkerConfig) -> LoopModel:
        """Create the parts that serving needs in addition to the model."""
        floor_s = DEVICE_FLOOR_S if config.on_gpu else FLOOR_S
        times = StepTimes(fixed_s=config.stall_timeout_s, floor_s=floor_s, token_s=loaded.token_s)
        grammars = Grammars(files, loaded.vocab_size)  # compiling a large vocabulary blocks all threads for a second
        grammars.start()
        if of_windows := loaded.windows_in_words:
            log.info("%s", of_windows)
        if num_bytes := loaded.pinned_bytes():
            log.info("pinned %.1f MiB of host memory for step and KV copies", num_bytes / 2**20)
        return cls(files, loaded, grammars, facts_of(loaded, config, files), times)

    def renew(self, files: ModelFiles, config: WorkerConfig) -> Callable[[], LoopModel]:
        """Load other weights next to the current ones. See `DutyOffer.renew`."""
        try:
            exchange = self.loaded.stage(files, config)
        except Exception as error:
            if problem := too_large(error):
                raise ModelError(f"{problem}; an update needs room for the weights twice") from error
            raise

        def renewed() -> LoopModel:
            loaded = exchange()
            return replace(self, files=files, loaded=loaded, facts=facts_of(loaded, config, files))

        return renewed

    @property
    def adapters(self) -> AdapterBank | None:
        return self.loaded.adapters

    @property
    def failure(self) -> str:
        return self.loaded.others.failure if self.loaded.others is not None else ""

    @property
    def is_leaving(self) -> bool:
        return False  # all ranks are on this host

    def register_metrics(self, metrics: WorkerMetrics) -> None:
        metrics.show_pinned(self.loaded.pinned_bytes)

    def prepare(self, engine: EngineLoop, config: WorkerConfig, role: Role) -> None:
        """Give an engine the step times of its role and, on a CPU that workers share, its number of threads."""
        engine.step_times, engine.step_fit = self.step_times, self.step_fits[role]
        if config.core_share and not config.on_gpu:
            cores = CoreShare(config.core_share, self.loaded.num_threads)
            self.loaded.share_cores(cores)
            engine.share_cores(cores, self.loaded.set_num_threads)

    def close(self) -> None:
        """Stop the other ranks and the threads of grammars."""
        if self.loaded.others is not None:
            self.loaded.others.close()
        self.grammars.close()


def free_memory() -> None:
    """Return memory of dropped models to the device and to the system."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing before CUDA is used
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def facts_of(loaded: LoadedModel, config: WorkerConfig, files: ModelFiles) -> ModelFacts:
    """Return the facts of a model that was loaded with these settings."""
    kv = loaded.kv
    return ModelFacts(
        model_id=loaded.model_id,
        fingerprint=loaded.fingerprint,
        weights=loaded.weights,
        max_model_len=loaded.max_model_len,
        block_size=kv.block_size,
        num_blocks=kv.num_blocks,
        block_bytes=kv.wire_bytes,
        precision=loaded.precision,
        kv_dtype=loaded.kv_dtype,
        resources=f"{loaded.num_threads} threads",
        layout=(
            ("dtype", loaded.dtype),
            ("kv_cache_dtype", loaded.kv_dtype),
            ("quantization", loaded.quantization),
            ("batch_invariant", str(config.batch_invariant).lower()),
            ("draft_head", kv.config.draft_head or "none"),
            ("kv_scales", blake2b(repr(kv.scales).encode(), digest_size=4).hexdigest() if kv.is_scaled else "none"),
        ),
        window=loaded.window,
        memory_bytes=kv.num_blocks * kv.wire_bytes + sum(path.stat().st_size for path in files.weights),
        changes_role=loaded.task.generates,
    )
