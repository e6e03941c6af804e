"""A device as asynchronous as can be: a launched step runs when its tokens are read, and not before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from common.model.batch import SequenceChunk
from common.runner.runner import ModelRunner
from common.sampling.sampler import PreparedRows, Sampler, SamplingRow
from common.wire.sampling_params import SampledToken


@dataclass(eq=False)
class LazyTokens:
    """A step that has not run. `before` must have run first; row i takes its token from row `sources[i]` of it."""

    device: LazyDevice
    before: LazyTokens | None
    chunks: list[SequenceChunk]
    sources: list[int]
    rows: PreparedRows | None = None
    tokens: list[SampledToken] = field(default_factory=list)

    def sample(self, rows: Sequence[SamplingRow]) -> None:
        assert self.device.last is self, "another step was launched before"
        self.device.num_late += self.before is not None and bool(self.before.tokens)
        self.rows = self.device.sampler.prepare(rows)

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
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self.runner, self.sampler = runner, sampler
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
        copies = [replace(c, token_ids=tuple(c.token_ids), block_table=tuple(c.block_table)) for c in chunks]
        self.last = LazyTokens(self, self.last, copies, list(sources))
        self.num_launched += 1
        self.num_fed += sum(source >= 0 for source in sources)
        return self.last

    def close(self) -> None:
        """Nothing runs by itself."""

    def run(self, step: LazyTokens) -> None:
        self.on_run()
        self.num_run += 1
        fills = any((chunk.start + 1) % self.runner.kv.block_size == 0 for chunk in step.chunks)
        if self.num_run == self.fail_at or (self.fail_full and fills):
            self.fail_full = False
            step.tokens = [SampledToken(0)] * len(step.chunks)
            raise RuntimeError("the device failed")
        if step.rows is None:
            step.tokens = [SampledToken(0)] * len(step.chunks)
            raise RuntimeError("its rows were not sampled")
        fed = [token.token_id for token in step.before.tokens] if step.before is not None else []
        chunks = [
            SequenceChunk((fed[source],), chunk.start, chunk.block_table) if source >= 0 else chunk
            for chunk, source in zip(step.chunks, step.sources, strict=True)
        ]
        step.tokens = self.sampler.launch(self.runner.forward(chunks), step.rows).read()
