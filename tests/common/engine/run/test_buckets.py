from __future__ import annotations

import pytest

from common.engine.run.recorded_steps import bucket_for, bucket_sizes


def test_small_steps_have_a_size_of_their_own() -> None:
    assert bucket_sizes(36) == (1, 2, 4, 8, 16, 24, 32, 36)
    assert bucket_sizes(8) == (1, 2, 4, 8)
    assert bucket_sizes(3) == (1, 2, 3)
    assert bucket_sizes(1) == (1,)


@pytest.mark.parametrize("largest", [1, 5, 64, 255, 256, 257, 300, 1000, 4096])
def test_sizes_rise_to_the_largest_and_padding_stays_small(largest: int) -> None:
    sizes = bucket_sizes(largest)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == largest
    assert len(sizes) <= 100
    for count in range(1, largest + 1):
        size = bucket_for(sizes, count)
        assert size is not None and count <= size < count + max(8, count // 4 + 1)


def test_nothing_holds_more_than_the_largest_or_nothing() -> None:
    assert bucket_for((1, 2, 4), 5) is None
    assert bucket_for((1, 2, 4), 0) is None
    assert [bucket_for((1, 2, 4), count) for count in (1, 2, 3, 4)] == [1, 2, 4, 4]
