"""Counted tokens behave as lists where production code uses them, and hashes say what is shared."""

from __future__ import annotations

import pytest

from benchmarks.simulator.world.tokens import Content, CountedPrompt, CountedTokens, InjectedHasher
from router.dispatch.prompt import PromptHashCache


def test_counted_tokens_are_a_list_of_zeros() -> None:
    tokens, zeros = CountedTokens(10), [0] * 10
    assert len(tokens) == 10 and list(tokens) == zeros
    assert bool(tokens) and not CountedTokens(0)
    for cut in (slice(3, None), slice(None, 4), slice(8, 20), slice(-2, None), slice(5, 2)):
        assert list(tokens[cut]) == zeros[cut]
    assert len(tokens + [1, 2]) == 12
    assert tokens[-1] == 0
    with pytest.raises(IndexError, match="token 10 of 10"):
        tokens[10]
    tokens.append(7)
    tokens.extend((1, 2))
    assert len(tokens) == 13


def hashes(content: Content, num_tokens: int, block_size: int = 16) -> list[bytes]:
    return InjectedHasher(content, block_size).extend(CountedTokens(num_tokens))


def test_blocks_are_shared_as_far_as_the_ids_are() -> None:
    one = hashes(Content(1, 200, ids=(5, 6, 7), id_tokens=64), 230)
    other = hashes(Content(2, 200, ids=(5, 6, 8), id_tokens=64), 230)
    assert len(one) == 14
    assert one[:8] == other[:8]  # 128 tokens of ids 5 and 6
    assert not set(one[8:]) & set(other[8:])
    assert len(set(one)) == 14


def test_the_answer_and_the_end_of_the_prompt_are_shared_with_nobody() -> None:
    """The last id covers tokens that the prompt does not have any more: they are answer."""
    one, other = (hashes(Content(number, 40, ids=(5,), id_tokens=64), 64) for number in (1, 2))
    assert one[:2] == other[:2]
    assert one[2] != other[2] and one[3] != other[3]


def test_copies_of_a_trace_share_nothing() -> None:
    one, other = (hashes(Content(number, 64, number, (5,), 64), 64) for number in (1, 2))
    assert not set(one) & set(other)


def test_a_router_gets_the_same_hashes_as_a_worker() -> None:
    content = Content(3, 100, ids=(1, 2), id_tokens=64)
    of_router = CountedPrompt(content).hasher(16, PromptHashCache())
    assert of_router.hashes == hashes(content, 100)
    assert of_router.extend(CountedTokens(130)) == hashes(content, 130)
    assert CountedPrompt(content).packed == b""
