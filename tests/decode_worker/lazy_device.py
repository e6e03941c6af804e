"""A device as asynchronous as can be: a launched step runs when its tokens are read, and not before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from common.engine.models.batch import SequenceChunk
from common.engine.run.runner import ModelRunner
from common.engine.run.step_launchers import rows_of
from common.engine.sampling.sampler import PreparedRows, Sampler, SamplingRow
from common.wire.sampling_params import SampledToken

from ..seated import SeatedDevice, SeatedStep

MAX_ROWS = 64


@dataclass(eq=False)
class LazyTokens:
    """A step that has not run. `before` must have run first; row i takes its token from row `sources[i]` of it."""

    device: LazyDevice
    before: LazyTokens | None
    seated: SeatedStep
    sources: list[int]
    rows: PreparedRows | None = None
    tokens: list[SampledToken] = field(default_factory=list)

    @property
    def chunks(self) -> list[SequenceChunk]:
        """As they were at the launch."""
        return self.seated.chunks

    def sample(self, rows: Mapping[int, SamplingRow]) -> None:
        assert self.device.last is self, "another step was launched before"
        self.device.num_late += self.before is not None and bool(self.before.tokens)
        self.rows = self.device.sampler.prepare(rows_of(self.chunks, rows))

    def read(self) -> list[SampledToken]:
        if not self.tokens:
            if self.before is not None:
                self.before.read()
            self.device.run(self)
            self.before = None
        return self.tokens


class LazyDevice:
    """Implements `Launcher`. `fail_at` is the number of the step that fails when it runs, `refuse_at` when launched.

    `num_late` counts the steps that were sampled once the tokens of the step before were read. With `fail_full`, the
    next step fails that is to write the last slot of a block.

    Sequences have their seats on it as on a GPU (`seats.py`): what each step reads there must be what it computes.
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self.runner, self.sampler = runner, sampler
        kv, config = runner.kv, runner.model.config
        self.seated = SeatedDevice(config, kv, MAX_ROWS, -(-config.max_model_len // kv.block_size))
        self.last: LazyTokens | None = None
        self.num_launched = self.num_fed = self.num_run = self.num_late = 0
        self.fail_at = self.refuse_at = 0
        self.fail_full = False
        self.on_run: Callable[[], object] = lambda: None

    def takes(self, chunks: Sequence[SequenceChunk]) -> bool:
        return all(chunk.sample and len(chunk.token_ids) == 1 for chunk in chunks)

    def launch(self, chunks: Sequence[SequenceChunk], sources: Sequence[int]) -> LazyTokens:
        if self.num_launched + 1 == self.refuse_at:
            self.refuse_at = 0
            raise RuntimeError("nothing can be launched")
        self.last = LazyTokens(self, self.last, self.seated.launch(chunks, sources), list(sources))
        self.num_launched += 1
        self.num_fed += sum(source >= 0 for source in sources)
        return self.last

    def close(self) -> None:
        """Nothing runs by itself."""

    def run(self, step: LazyTokens) -> None:
        self.on_run()
        self.num_run += 1
        fed = [token.token_id for token in step.before.tokens] if step.before is not None else []
        self.seated.sampled[: len(fed)] = torch.tensor(fed, dtype=torch.int64)
        chunks = [
            chunk._replace(token_ids=(fed[source],)) if source >= 0 else chunk
            for chunk, source in zip(step.chunks, step.sources, strict=True)
        ]
        step.seated.run([chunk.token_ids[0] for chunk in chunks], size=len(chunks) + 2)
        fills = any((chunk.start + 1) % self.runner.kv.block_size == 0 for chunk in chunks)
        if self.num_run == self.fail_at or (self.fail_full and fills):
            self.fail_full = False
            step.tokens = [SampledToken(0)] * len(chunks)
            raise RuntimeError("the device failed")
        if step.rows is None:
            step.tokens = [SampledToken(0)] * len(chunks)
            raise RuntimeError("the step was not sampled")
        step.tokens = self.sampler.launch(self.runner.forward(chunks), step.rows).read()
