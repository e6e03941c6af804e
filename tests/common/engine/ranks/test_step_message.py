"""A step as one message."""

from __future__ import annotations

import numpy as np
import pytest

from common.engine.models.batch import SequenceChunk
from common.engine.ranks.steps import pack_launch, pack_sizes, pack_step, token_ids_of, unpack, unpack_step
from common.engine.run.recorded_steps import StepLaunch, StepSizes
from common.engine.run.seats import SeatChanges

CHUNKS = (
    SequenceChunk([5, 6, 7], 30, [4, 9, 2], sample=False),
    SequenceChunk([2**31 - 1], 15, [2**31 - 1], adapter=3),
    SequenceChunk([1, 2], 0, [8, 8, 8, 8], sample=False, all_logits=True),
    SequenceChunk([3], 64, [-1, -1, 7, 6, 5], all_logits=True),
)


@pytest.mark.parametrize("count", range(1, len(CHUNKS) + 1))
def test_a_step_comes_out_as_it_went_in(count: int) -> None:
    """But for the blocks of a table that the step does not reach."""
    for got, sent in zip(unpack_step(pack_step(CHUNKS[:count], 16)), CHUNKS[:count], strict=True):
        used = -(-(sent.start + len(sent.token_ids)) // 16)
        assert (got.token_ids, got.start, got.block_table) == (sent.token_ids, sent.start, sent.block_table[:used])
        assert (got.sample, got.all_logits, got.adapter) == (sent.sample, sent.all_logits, sent.adapter)


def test_token_ids_may_be_filled_in_later() -> None:
    packed = pack_step(CHUNKS, 16)
    token_ids_of(packed)[:] = range(7)
    assert [chunk.token_ids for chunk in unpack_step(packed)] == [[0, 1, 2], [3], [4, 5], [6]]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_replay_comes_out_as_it_went_in(count: int, adapted: bool) -> None:
    """Wherever in the message its words of 64 bits begin."""
    words = np.array([-(2**63), 2**63 - 1, 5], dtype=np.int64)[:count]
    changes = SeatChanges(np.array([7, 0, 2**31 - 1], dtype=np.int64)[:count], words)
    sent = pack_launch(StepLaunch(24, adapted, changes))
    assert len(sent) == 4 + 3 * count
    got = unpack(np.frombuffer(sent.tobytes(), dtype=np.int32))
    assert isinstance(got, StepLaunch)
    assert (got.size, got.adapted) == (24, adapted)
    for mine, theirs in zip(got.changes, changes, strict=True):
        assert mine.dtype == np.int64 and np.array_equal(mine, theirs)


def test_each_kind_of_message_is_told_apart() -> None:
    sizes = StepSizes(256, 4096, adapts=True)
    assert unpack(pack_sizes(sizes)) == sizes
    assert unpack(pack_step(CHUNKS, 16)) == unpack_step(pack_step(CHUNKS, 16))
