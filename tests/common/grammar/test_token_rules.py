"""What ends a sequence, and which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.engine.sampling.sampler import Sampler, SamplingRow
from common.grammar.grammar import Constraint
from common.grammar.token_rules import (
    FREE,
    TokenLimits,
    banned_tokens,
    finish_reason,
    num_output_needed,
    token_limits,
    token_mask,
)
from common.wire.sampling_params import BadWord, SamplingParams, ThinkingBudget

EOS = (2, 3)


def reason(token_id: int, num_output: int = 1, num_tokens: int = 10, max_model_len: int = 100, **params: object) -> str:
    return finish_reason(
        SamplingParams(**({"max_tokens": 5} | params)),  # type: ignore[arg-type]
        EOS,
        num_output_tokens=num_output,
        token_id=token_id,
        num_tokens=num_tokens,
        max_model_len=max_model_len,
    )


@pytest.mark.parametrize("token_id", EOS)
def test_end_token_stops(token_id: int) -> None:
    assert reason(token_id) == "stop"


def test_other_token_goes_on() -> None:
    assert reason(7) == ""


def test_ignore_eos_ignores_the_models_end_tokens_only() -> None:
    assert reason(2, ignore_eos=True) == ""
    assert reason(9, ignore_eos=True, stop_token_ids=(9,)) == "stop"


@pytest.mark.parametrize(("num_output", "expected"), [(4, ""), (5, "length"), (6, "length")])
def test_max_tokens(num_output: int, expected: str) -> None:
    assert reason(7, num_output) == expected


@pytest.mark.parametrize(("num_tokens", "expected"), [(99, ""), (100, "length"), (101, "length")])
def test_model_length(num_tokens: int, expected: str) -> None:
    assert reason(7, num_tokens=num_tokens) == expected


def test_stop_goes_before_length() -> None:
    assert reason(2, 5) == "stop"


@pytest.mark.parametrize(("num_output", "expected"), [(1, ""), (2, ""), (3, "stop")])
def test_end_token_counts_after_min_tokens_others(num_output: int, expected: str) -> None:
    assert reason(2, num_output, min_tokens=2) == expected


def test_length_needs_no_min_tokens() -> None:
    assert reason(7, 5, min_tokens=50) == "length"


@pytest.mark.parametrize("num_output", range(6))
def test_an_end_token_that_may_be_sampled_stops(num_output: int) -> None:
    params = SamplingParams(max_tokens=50, min_tokens=3, stop_token_ids=(9,))
    banned = banned_tokens(params, EOS, num_output)
    assert set(banned) == ({2, 3, 9} if num_output < 3 else set())
    assert reason(9, num_output + 1, max_tokens=50, min_tokens=3, stop_token_ids=(9,)) == ("" if banned else "stop")


VOCAB, END_TOKENS = 40, 39


def packed(*words: Sequence[int]) -> tuple[BadWord, ...]:
    return tuple(map(BadWord.of, words))


def limits(output: Sequence[int], **fields: object) -> TokenLimits:
    params = SamplingParams(max_tokens=100, **fields)  # type: ignore[arg-type]
    kept = output[max(0, len(output) - num_output_needed(params, len(output))) :]
    return token_limits(params, (END_TOKENS,), len(output), kept)


def generate(logits: torch.Tensor, count: int, **fields: object) -> list[int]:
    """Greedy tokens of logits that are always the same."""
    params, output = SamplingParams(max_tokens=100, temperature=0.0, **fields), []  # type: ignore[arg-type, var-annotated]
    for _ in range(count):
        row = SamplingRow(params, len(output), output, (), token_limits(params, (END_TOKENS,), len(output), output))
        (token,) = Sampler(VOCAB).sample(logits[None], [row])
        output.append(token.token_id)
    return output


@pytest.fixture
def logits() -> torch.Tensor:
    """Token 0 is best, then 1, and so on."""
    return -torch.arange(VOCAB, dtype=torch.float32)


def test_nothing_is_limited_by_default() -> None:
    assert limits([1, 2, 3]) is FREE


def test_a_bad_word_of_one_token_never_comes(logits: torch.Tensor) -> None:
    assert generate(logits, 3, bad_words=packed((0,), (2,))) == [1, 1, 1]


def test_the_last_token_of_a_bad_word_does_not_follow_the_others(logits: torch.Tensor) -> None:
    assert generate(logits, 6, bad_words=packed((0, 0))) == [0, 1, 0, 1, 0, 1]
    assert generate(logits, 6, bad_words=packed((0, 0, 0))) == [0, 0, 1, 0, 0, 1]


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=4),
    st.lists(st.integers(0, 3), max_size=12),
)
def test_bad_words_ban_exactly_what_would_complete_one(words: list[tuple[int, ...]], output: list[int]) -> None:
    found = limits(output, bad_words=packed(*words))
    complete = {token for token in range(4) for word in words if (*output, token)[-len(word) :] == word}
    assert set(found.banned) == complete


def test_only_allowed_tokens_come(logits: torch.Tensor) -> None:
    assert generate(logits, 2, allowed_token_ids=(7, 30, 1000)) == [7, 7]
    assert generate(logits, 2, allowed_token_ids=(7, 30), logit_bias=((30, 50.0),)) == [30, 30]
    assert generate(logits, 1, allowed_token_ids=(END_TOKENS,), min_tokens=5) == [END_TOKENS]  # nothing else may come


def test_without_an_allowed_token_there_is_none(logits: torch.Tensor) -> None:
    assert generate(logits, 1, allowed_token_ids=(1000,)) >= [VOCAB]


@given(st.sets(st.integers(0, 99)), st.integers(1, 99))
def test_a_mask_has_a_bit_for_each_token(token_ids: set[int], vocab: int) -> None:
    mask = token_mask(tuple(token_ids), vocab)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=len(mask) * 32)
    assert set(np.flatnonzero(bits)) == {token_id for token_id in token_ids if token_id < vocab}


def test_a_thought_ends_at_its_budget(logits: torch.Tensor) -> None:
    budget = ThinkingBudget(3, (20, 21))
    assert generate(logits, 7, thinking=budget) == [0, 0, 0, 20, 21, 0, 0]
    assert generate(logits, 4, thinking=ThinkingBudget(0, (20, 21))) == [20, 21, 0, 0]


def test_a_thought_that_ended_before_is_left_alone() -> None:
    budget = ThinkingBudget(3, (20, 21))
    assert limits([20, 21, 5], thinking=budget).forced is None
    assert limits([5, 20, 21, 6], thinking=budget).forced is None
    assert limits([5, 5, 20], thinking=budget).forced == 21  # the model had begun the mark itself
    assert limits([5, 20, 5], thinking=budget).forced == 20
    assert limits([5] * 9, thinking=budget) is FREE


@given(
    st.lists(st.sampled_from([0, 1, 256, 2**24]), max_size=12),
    st.lists(st.sampled_from([0, 1, 256]), min_size=1, max_size=3),
)
def test_a_mark_is_found_wherever_it_is(output: list[int], end: list[int]) -> None:
    """Packed tokens contain each other's bytes at other places, too."""
    found = limits(output, thinking=ThinkingBudget(len(output), tuple(end))).forced
    is_there = any(output[place : place + len(end)] == end for place in range(len(output)))
    written = max(size for size in range(len(end)) if not size or output[-size:] == end[:size])
    assert found == (None if is_there else end[written])


def as_bytes(token_ids: Sequence[int]) -> bytes:
    return b"".join(
        {0: b"a", 1: b"<", 2: b"/t>", 3: b"</t", 4: b">\n", 5: b"</t>", 6: b"<t>", 7: b"\n"}[i] for i in token_ids
    )


@pytest.mark.parametrize(
    ("output", "forced"),
    [
        ([6, 0, 0], 1),
        ([7, 6, 0], 1),  # white space before the mark
        ([6, 0, 1], 2),  # the model had begun the mark itself
        ([6, 3, 4], None),  # other tokens spell the mark, and share one with other text
        ([6, 0, 5], None),
        ([0, 0, 0], None),  # no thought
    ],
)
def test_marks_are_found_however_tokens_spell_them(output: list[int], forced: int | None) -> None:
    params = SamplingParams(max_tokens=100, thinking=ThinkingBudget(3, (1, 2), (6,)))
    assert token_limits(params, (END_TOKENS,), len(output), output, as_bytes).forced == forced


def test_a_grammar_may_delay_the_end_of_a_thought(logits: torch.Tensor) -> None:
    """A forced token that would split a character waits."""
    budget = ThinkingBudget(1, (20,))
    assert (
        limits([0, 0, 0], thinking=budget).forced is None
        and limits([0, 0, 0], thinking=budget, grammar="x").forced == 20
    )
    split = np.array([0b10], dtype=np.int32)

    class Split(Constraint):
        def allowed(self, output_token_ids: Sequence[int]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate([split, split]))

    row = SamplingRow(SamplingParams(max_tokens=9), 0, (), (), TokenLimits((), 20), Split(None, VOCAB))
    (token,) = Sampler(VOCAB).sample(logits[None], [row])
    assert token.token_id == 1


def test_an_answer_without_a_thought_is_left_alone() -> None:
    budget = ThinkingBudget(4, (20,), (10, 11))
    assert limits([10, 11, 5, 5], thinking=budget).forced == 20
    assert limits([5, 5, 5, 5], thinking=budget).forced is None
