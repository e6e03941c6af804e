"""Draft model of a decode worker: a smaller model whose tokens the served model verifies (speculative decoding)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from common.config import DecodeWorkerConfig
from common.engine.kv import KVCache, block_bytes
from common.engine.models import SequenceChunk, load_model, open_model
from common.engine.run.runner import ModelRunner, RunnableModel
from common.engine.run.warm_up import warm_up_runner
from common.errors import ConfigError, ModelError
from common.model_files import ModelFiles, Quantization, Tokenizer, resolve_model

log = logging.getLogger(__name__)
MIN_COMMON = 0.99
"""Share of the larger vocabulary that both models must have. Vocabularies of a family differ at their ends."""
TIMED_STEPS = 3

MakeRunner = Callable[[RunnableModel, KVCache], ModelRunner]


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A loaded draft model. During warm-up, a step of one row took `step_s`, and a token of a small chunk `token_s`."""

    model_id: str
    runner: ModelRunner
    step_s: float
    token_s: float


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A draft model that matches the served one, before loading. Its KV takes `block_bytes` per block."""

    files: ModelFiles
    dtype: str
    quantization: str
    block_bytes: int

    @classmethod
    def of(cls, served: ModelFiles, config: DecodeWorkerConfig, dtype: str) -> DraftPlan:
        """Resolve the draft model. Raises ConfigError if the vocabularies differ, ModelError if it is not supported."""
        files = resolve_model(config.draft_model, progress=False)
        check_vocabulary(served, files, config.draft_model)
        shape, source = open_model(files)
        wanted = config.draft_quantization
        if wanted == "auto" and config.torch_device == "cpu" and not source.has_quantised:
            wanted = Quantization.INT8.value
        return cls(files, dtype, wanted, block_bytes(shape, config.block_tokens, dtype))

    @property
    def weight_bytes(self) -> int:
        """Approximate size of the weights in memory: that of the files."""
        return sum(path.stat().st_size for path in self.files.weights)

    def load(self, config: DecodeWorkerConfig, num_blocks: int, make_runner: MakeRunner) -> DraftModel:
        """Load the weights and run the first steps. Raises ModelError or ConfigError."""
        try:
            model = load_model(self.files, dtype=self.dtype, device=config.torch_device, quantization=self.quantization)
        except ModelError as error:
            raise ModelError(f"cannot load the draft model: {error}") from error
        kv = KVCache(model.config, num_blocks, config.block_tokens, self.dtype, config.torch_device)
        runner = warm_up_runner(lambda: make_runner(model, kv), config)
        profile = runner.profile
        token_s = profile.forward_s / max(1, profile.num_tokens)
        step_s = min(_step_s(runner) for _ in range(TIMED_STEPS))
        log.info(
            "draft model %s loaded: %.2f ms per step, %.2f GiB of KV blocks",
            self.files.model_id,
            step_s * 1e3,
            num_blocks * kv.block_bytes / 2**30,
        )
        return DraftModel(self.files.model_id, runner, step_s, token_s)


def check_vocabulary(served: ModelFiles, draft: ModelFiles, name: str) -> None:
    """Raise ConfigError unless every token has the same id in both models."""
    if served.tokenizer == draft.tokenizer:
        return
    ours, theirs = (Tokenizer.from_file(files.tokenizer).vocabulary() for files in (served, draft))
    common = ours.keys() & theirs.keys()
    others = [token_id for token_id in sorted(common) if ours[token_id] != theirs[token_id]]
    allowed = f"a model with the vocabulary of {served.model_id}"
    if others:
        first = others[0]
        which = f"token {first} is {theirs[first]!r} instead of {ours[first]!r}"
        raise ConfigError("draft_model", name, f"{allowed}: {len(others)} tokens differ, first {which}")
    if len(common) < MIN_COMMON * max(len(ours), len(theirs)):
        raise ConfigError("draft_model", name, f"{allowed}: it has {len(theirs)} tokens instead of {len(ours)}")


def _step_s(runner: ModelRunner) -> float:
    """Return the duration of a step of one row, in seconds."""
    began = time.perf_counter()
    runner.forward([SequenceChunk((0,), 16, (0, 1))])
    runner.wait()
    return time.perf_counter() - began
