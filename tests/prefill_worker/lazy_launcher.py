"""A device as asynchronous as can be: a launched step of prompts runs when its outputs are read, and not before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.engine.models.batch import SequenceChunk
from common.engine.sampling.sampler import SamplingRow
from prefill_worker.launcher import ChunkOutput, PromptLauncher
from prefill_worker.scheduler import PrefillChunk


@dataclass(eq=False)
class LazyPrompts:
    """A step that has not run, with the model's chunks as they were at its launch."""

    device: LazyLauncher
    number: int
    chunks: Sequence[PrefillChunk]
    asked: dict[PrefillChunk, SequenceChunk]
    rows: Sequence[SamplingRow]
    is_done: bool = field(default=False, init=False)

    def read(self) -> Sequence[ChunkOutput]:
        self.is_done = True
        return self.device.run(self)


class LazyLauncher(PromptLauncher):
    """`events` are launches and reads of steps, in turn. `fail_at` is the number of the step that fails when it runs,
    `refuse_at` of the one that fails when it is launched."""

    runs_ahead = True  # type: ignore[assignment]

    def __init__(self, *parts: object) -> None:
        super().__init__(*parts)  # type: ignore[arg-type]
        self.events: list[tuple[str, int]] = []
        self.num_launched = 0
        self.fail_at = self.refuse_at = -1
        self._asked: dict[PrefillChunk, SequenceChunk] = {}

    @property
    def num_ahead(self) -> int:
        """Steps that were launched before the step before them was read."""
        at = {event: place for place, event in enumerate(self.events)}
        return sum(
            at["launched", number] < at["read", number - 1]
            for number in range(1, self.num_launched)
            if ("launched", number) in at and ("read", number - 1) in at
        )

    def launch(self, chunks: Sequence[PrefillChunk], rows: Sequence[SamplingRow]) -> LazyPrompts:
        number = self.num_launched
        self.num_launched += 1
        if number == self.refuse_at:
            raise RuntimeError("nothing can be launched")
        self.events.append(("launched", number))
        asked = {}
        for chunk in chunks:
            one = super()._model_chunk(chunk)
            asked[chunk] = one._replace(block_table=tuple(one.block_table))
        return LazyPrompts(self, number, chunks, asked, rows)

    def run(self, step: LazyPrompts) -> Sequence[ChunkOutput]:
        self.events.append(("read", step.number))
        if step.number == self.fail_at:
            raise RuntimeError("the device failed")
        self._asked = step.asked
        return super().launch(step.chunks, step.rows).read()

    def _model_chunk(self, chunk: PrefillChunk) -> SequenceChunk:
        return self._asked[chunk]
