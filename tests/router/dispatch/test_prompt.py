"""Requests that answer one prompt share what is made of it, and each goes on from there by itself."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.blocks.block_hash import BlockHasher, block_hashes
from common.wire.message_fields import pack_tokens
from common.wire.messages import TokenDelta
from common.wire.sampling_params import SamplingParams
from router.dispatch import prompt as prompts
from router.dispatch.client import GenerationRequest
from router.dispatch.prompt import ALTERNATIVES, TAIL_BLOCKS, Prompt, PromptHashCache
from router.dispatch.request_state import RequestState

TOKENS = list(range(100, 1100))


def state(number: int, prompt: Prompt | None, salt: str = "") -> RequestState:
    params = SamplingParams(max_tokens=1000, seed=number)
    return RequestState(GenerationRequest(f"r-{number}", TOKENS, params, salt, prompt=prompt), 0.0)


def says(state: RequestState, token_ids: list[int]) -> None:
    delta = TokenDelta(state.request.request_id, 0, len(state.stream.token_ids), tuple(token_ids))
    assert state.stream.add(delta)


def test_a_prompt_is_packed_and_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Any] = []
    hashed: list[int] = []
    extend = BlockHasher._extend

    def counted(self: BlockHasher, new: bytes) -> list[bytes]:
        before = len(self.hashes)
        hashes = extend(self, new)
        hashed.append(len(hashes) - before)
        return hashes

    monkeypatch.setattr(prompts, "pack_tokens", lambda ids: packed.append(ids) or pack_tokens(ids))
    monkeypatch.setattr(BlockHasher, "_extend", counted)
    shared = Prompt(TOKENS)
    for number in range(128):
        one = state(number, shared)
        assert one.packed_prompt(0) == pack_tokens(TOKENS) and len(one.hashes(16)) == 62
    assert len(packed) == 1 and sum(hashed) == 62


@pytest.mark.parametrize("salt", ["", "tenant"])
@pytest.mark.parametrize("block_size", [1, 7, 16, 2000])
def test_each_answer_goes_on_from_the_shared_prompt(salt: str, block_size: int) -> None:
    shared = Prompt(TOKENS, salt)
    one, other = state(1, shared, salt), state(2, shared, salt)
    for count in range(1, 20):
        says(one, list(range(count)))
        says(other, list(range(count, 2 * count)))
        for each in (one, other):
            output = each.stream.token_ids
            assert each.hashes(block_size) == block_hashes(TOKENS + output, block_size, salt)
            assert each.packed_prompt(len(output)) == pack_tokens(TOKENS + output)
    assert state(3, shared, salt).hashes(block_size) == block_hashes(TOKENS, block_size, salt)


def test_a_request_of_its_own_needs_no_shared_prompt() -> None:
    alone = state(1, None, "tenant")
    says(alone, [1, 2, 3])
    assert alone.hashes(16) == block_hashes([*TOKENS, 1, 2, 3], 16, "tenant")
    assert alone.packed_prompt(2) == pack_tokens([*TOKENS, 1, 2])


SIZE = 16
LONG = [number % 49_000 for number in range(5000)]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes were hashed, one number a call."""
    extend, counted = BlockHasher._extend, list[int]()

    def count(hasher: BlockHasher, new: bytes) -> list[bytes]:
        counted.append(len(new))
        return extend(hasher, new)

    monkeypatch.setattr(BlockHasher, "_extend", count)
    return counted


def hashes(known: PromptHashCache, tokens: list[int], salt: str = "", size: int = SIZE) -> list[bytes]:
    return known.hasher(pack_tokens(tokens), size, salt).hashes


def test_of_a_conversation_that_goes_on_only_the_rest_is_hashed(hashed: list[int]) -> None:
    known = PromptHashCache()
    hashes(known, LONG)
    more = [*LONG[:-3], *range(40)]
    found = hashes(known, more)
    assert hashed[1] == 4 * SIZE * (len(more) // SIZE - (len(LONG) - 3) // SIZE)
    assert found == block_hashes(more, SIZE)
    assert len(known._prompts) == 1 and sum(map(len, known._prompts.values())) == 1, "the earlier turn is replaced"


@pytest.mark.parametrize("other", [("tenant", SIZE), ("", 32)])
def test_another_salt_or_size_of_blocks_finds_nothing(hashed: list[int], other: tuple[str, int]) -> None:
    known, (salt, size) = PromptHashCache(), other
    hashes(known, LONG)
    assert hashes(known, LONG, salt, size) == block_hashes(LONG, size, salt)
    assert hashed[1] == 4 * size * (len(LONG) // size)


def test_conversations_behind_one_beginning_are_all_known(hashed: list[int]) -> None:
    known = PromptHashCache()
    conversations = [[*LONG[:2000], *range(start, start + 3000)] for start in range(ALTERNATIVES)]
    for tokens in conversations:
        hashes(known, tokens)
    assert all(hashed)
    hashed.clear()
    for tokens in conversations:
        hashes(known, tokens)
    assert hashed == [0] * ALTERNATIVES


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4000), st.integers(0, 700)), min_size=1, max_size=12),
    st.sampled_from([1, 16, 100]),
)
def test_hashes_are_those_without_memory(turns: list[tuple[int, int, int]], size: int) -> None:
    """Each turn keeps a part of an earlier prompt and goes on otherwise."""
    known, source, past = PromptHashCache(max_bytes=200_000), random.Random(0), [LONG[:3000]]
    for which, num_kept, num_new in turns:
        tokens = [*past[which % len(past)][:num_kept], *(source.randrange(49_000) for _ in range(num_new))]
        assert hashes(known, tokens, size=size) == block_hashes(tokens, size)
        past.append(tokens)
        kept = [one for prompts in known._prompts.values() for one in prompts]
        assert known.num_bytes == sum(one.num_bytes for one in kept) <= 200_000


def test_what_is_kept_is_bounded(hashed: list[int]) -> None:
    known = PromptHashCache(max_bytes=100_000)
    prompts = [[start, *LONG] for start in range(10)]
    for tokens in prompts:
        hashes(known, tokens)
        assert known.num_bytes <= 100_000
    hashed.clear()
    hashes(known, prompts[-1])
    hashes(known, prompts[0])
    assert hashed == [0, 4 * SIZE * (len(prompts[0]) // SIZE)], "the oldest go first"


def test_a_branch_that_leaves_early_does_not_replace(hashed: list[int]) -> None:
    known = PromptHashCache()
    hashes(known, LONG)
    hashes(known, [*LONG[: -SIZE * (TAIL_BLOCKS + 2)], *range(3000)])
    hashed.clear()
    hashes(known, LONG)
    assert hashed == [0]
