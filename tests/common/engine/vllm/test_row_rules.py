"""Penalties, bad words and thinking budgets: the same with output in the prompt as without."""

from __future__ import annotations

import msgspec
import pytest
import torch

from common.engine.vllm.requests import TokenRules
from common.engine.vllm.row_rules import HostRow
from common.grammar import BANNED
from common.wire import BadWord, SamplingParams, ThinkingBudget

VOCAB = 12
PROMPT, OUTPUT = [1, 2, 2], [3, 3, 4, 5]


def logits_after(params: SamplingParams, earlier: int, output: list[int]) -> torch.Tensor:
    """Return the logits after `output`, of which the first `earlier` tokens are in vLLM's prompt."""
    rules = TokenRules(start=len(PROMPT), params=msgspec.msgpack.encode(params))
    prompt, own = PROMPT + output[:earlier], list[int]()
    row = HostRow(rules, prompt, own)
    logits = torch.empty(0)
    for count in range(len(output) - earlier + 1):
        own[:] = output[earlier : earlier + count]
        logits = torch.linspace(-1.0, 2.0, VOCAB)
        row.apply(logits)
    return logits


@pytest.mark.parametrize("earlier", [0, 1, 3, 4])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=9, presence_penalty=1.5),
        SamplingParams(max_tokens=9, frequency_penalty=0.5, presence_penalty=-1.0, repetition_penalty=1.3),
    ],
)
def test_penalties_count_earlier_output(params: SamplingParams, earlier: int) -> None:
    expected = torch.linspace(-1.0, 2.0, VOCAB)
    for token in set(PROMPT + OUTPUT):
        value = expected[token]
        expected[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token in set(OUTPUT):
        expected[token] -= params.frequency_penalty * OUTPUT.count(token) + params.presence_penalty
    assert torch.allclose(logits_after(params, earlier, OUTPUT), expected)


@pytest.mark.parametrize("earlier", [0, 1, 4])
def test_bad_words_may_begin_in_earlier_output(earlier: int) -> None:
    params = SamplingParams(max_tokens=9, bad_words=(BadWord.of([4, 5, 6]), BadWord.of([7]), BadWord.of([2, 3, 8])))
    logits = logits_after(params, earlier, OUTPUT)
    assert [token for token in range(VOCAB) if logits[token] <= BANNED] == [6, 7]


def test_a_bad_word_is_used_if_a_grammar_allows_nothing_else() -> None:
    params = SamplingParams(max_tokens=9, bad_words=(BadWord.of([7]), BadWord.of([8])))
    logits = torch.full((VOCAB,), -torch.inf)
    logits[7] = 0.5
    HostRow(TokenRules(start=1, params=msgspec.msgpack.encode(params)), [1], []).apply(logits)
    assert allowed(logits) == [7]


@pytest.mark.parametrize("earlier", [0, 2, 4])
def test_thinking_ends_after_its_budget(earlier: int) -> None:
    params = SamplingParams(max_tokens=9, thinking=ThinkingBudget(4, (9, 10), (3,)))
    assert allowed(logits_after(params, earlier, OUTPUT)) == [9]
    assert allowed(logits_after(params, earlier, [*OUTPUT, 9])) == [10]
    assert len(allowed(logits_after(params, earlier, [*OUTPUT, 9, 10]))) == VOCAB


def test_tokens_in_flight_do_not_count() -> None:
    params = SamplingParams(max_tokens=9, presence_penalty=1.0)
    rules = TokenRules(start=1, params=msgspec.msgpack.encode(params))
    logits = torch.zeros(VOCAB)
    HostRow(rules, [1], [3, -1]).apply(logits)
    assert logits[3] == -1.0 and logits.sum() == -1.0


def allowed(logits: torch.Tensor) -> list[int]:
    return [token for token in range(VOCAB) if logits[token] > -torch.inf]
