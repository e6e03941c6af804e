"""A second, smaller model on a decode worker, whose tokens the served model checks (speculative decoding)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from common.config import DecodeWorkerConfig
from common.engine.kv import KVCache, block_bytes
from common.engine.models import SequenceChunk, load_model, open_model
from common.engine.run.runner import ModelRunner, RunnableModel
from common.engine.run.warm_up import warmed_up
from common.errors import ConfigError, ModelError
from common.model_files import ModelFiles, Quantization, Tokenizer, resolve_model

log = logging.getLogger(__name__)
LEAST_COMMON = 0.99
"""The share of the larger vocabulary that both models must have. Vocabularies of one family differ at their ends."""
TIMED_STEPS = 3

MakeRunner = Callable[[RunnableModel, KVCache], ModelRunner]


@dataclass(frozen=True, slots=True)
class DraftModel:
    """What runs a draft model. In its warm-up a step of one row took `step_s`, a token of a small chunk `token_s`."""

    model_id: str
    runner: ModelRunner
    step_s: float
    token_s: float


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A draft model that fits the served one, before its weights are read. A block of its KV has `block_bytes`."""

    files: ModelFiles
    dtype: str
    quantization: str
    block_bytes: int

    @classmethod
    def of(cls, served: ModelFiles, config: DecodeWorkerConfig, dtype: str) -> DraftPlan:
        """Raises ConfigError when its vocabulary is another one, or ModelError when it cannot be served."""
        files = resolve_model(config.draft_model, progress=False)
        check_vocabulary(served, files, config.draft_model)
        shape, source = open_model(files)
        wanted = config.draft_quantization
        if wanted == "auto" and config.torch_device == "cpu" and not source.has_quantised:
            wanted = Quantization.INT8.value
        return cls(files, dtype, wanted, block_bytes(shape, config.block_tokens, dtype))

    @property
    def weight_bytes(self) -> int:
        """What its weights take about: the size of its files."""
        return sum(path.stat().st_size for path in self.files.weights)

    def load(self, config: DecodeWorkerConfig, num_blocks: int, make_runner: MakeRunner) -> DraftModel:
        """Reads the weights and runs first steps. Raises ModelError or ConfigError."""
        try:
            model = load_model(self.files, dtype=self.dtype, device=config.torch_device, quantization=self.quantization)
        except ModelError as error:
            raise ModelError(f"the draft model cannot be loaded: {error}") from error
        kv = KVCache(model.config, num_blocks, config.block_tokens, self.dtype, config.torch_device)
        runner = warmed_up(lambda: make_runner(model, kv), config)
        profile = runner.profile
        token_s = profile.forward_s / max(1, profile.num_tokens)
        step_s = min(_step_s(runner) for _ in range(TIMED_STEPS))
        log.info(
            "draft model: %s, a step takes %.2f ms, %.2f GiB of KV blocks",
            self.files.model_id,
            step_s * 1e3,
            num_blocks * kv.block_bytes / 2**30,
        )
        return DraftModel(self.files.model_id, runner, step_s, token_s)


def check_vocabulary(served: ModelFiles, draft: ModelFiles, name: str) -> None:
    """Raises ConfigError unless each token has the same id in both models."""
    if served.tokenizer == draft.tokenizer:
        return
    ours, theirs = (Tokenizer.from_file(files.tokenizer).vocabulary() for files in (served, draft))
    common = ours.keys() & theirs.keys()
    others = [token_id for token_id in sorted(common) if ours[token_id] != theirs[token_id]]
    allowed = f"a model of the vocabulary of {served.model_id}"
    if others:
        first = others[0]
        which = f"token {first} is {theirs[first]!r}, not {ours[first]!r}"
        raise ConfigError("draft_model", name, f"{allowed}: {len(others)} tokens differ, the first: {which}")
    if len(common) < LEAST_COMMON * max(len(ours), len(theirs)):
        raise ConfigError("draft_model", name, f"{allowed}: it has {len(theirs)} tokens instead of {len(ours)}")


def _step_s(runner: ModelRunner) -> float:
    """Seconds of a step of one row."""
    began = time.perf_counter()
    runner.forward([SequenceChunk((0,), 16, (0, 1))])
    runner.wait()
    return time.perf_counter() - began
