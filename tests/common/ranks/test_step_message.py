"""A step as one message."""

from __future__ import annotations

import pytest

from common.model.batch import SequenceChunk
from common.ranks.step_message import pack_step, token_ids_of, unpack_step

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
