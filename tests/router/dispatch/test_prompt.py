"""Requests that answer one prompt share what is made of it, and each goes on from there by itself."""

from __future__ import annotations

from typing import Any

import pytest

from common.blocks.block_hash import BlockHasher, block_hashes
from common.wire.message_fields import pack_tokens
from common.wire.messages import TokenDelta
from common.wire.sampling_params import SamplingParams
from router.dispatch import prompt as prompts
from router.dispatch.client import GenerationRequest
from router.dispatch.prompt import Prompt
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
