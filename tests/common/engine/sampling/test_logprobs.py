"""Log-probabilities against float64, ties and what is no number included; a step's logits taken apart."""

from __future__ import annotations

import pytest
import torch

from common.engine.models.batch import SequenceChunk
from common.engine.sampling.logprobs import chunk_logprobs, max_prompt_logprobs, separate, token_logprobs
from common.wire.sampling_params import LOGPROB_FLOOR


def logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs_are_those_of_float64(count: int) -> None:
    rows = logits(9, 300)
    exact = torch.log_softmax(rows.double(), dim=-1)
    for i, wants_prompt_logprobs in enumerate(token_logprobs(rows, range(9), count)):
        assert wants_prompt_logprobs.logprob == pytest.approx(exact[i, i].item(), abs=1e-5)
        best = torch.topk(exact[i], count)
        assert [token for token, _ in wants_prompt_logprobs.top] == best.indices.tolist()
        assert [value for _, value in wants_prompt_logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("count", [1, 3, 4, 20])
def test_ties_go_by_lowest_id(count: int) -> None:
    rows = torch.zeros(3, 40)
    rows[1, [30, 10, 20]] = 5.0
    rows[2] = torch.tensor([float(i % 4) for i in range(40)])
    for row, wants_prompt_logprobs in zip(rows, token_logprobs(rows, [0, 0, 0], count), strict=True):
        expected = sorted(range(40), key=lambda i: (-row[i].item(), i))[:count]
        assert [token for token, _ in wants_prompt_logprobs.top] == expected


def test_a_row_counts_for_itself_alone() -> None:
    rows = logits(40, 5000, seed=3)
    together = token_logprobs(rows, range(40), 4)
    torch_threads = torch.get_num_threads()
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        assert [token_logprobs(rows[i : i + 1], [i], 4)[0] for i in range(40)] == together
    torch.set_num_threads(torch_threads)


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    (wants_prompt_logprobs,) = token_logprobs(logits(1, 6), [0], 20)
    assert sorted(token for token, _ in wants_prompt_logprobs.top) == list(range(6))


def test_what_is_no_number_is_the_floor() -> None:
    rows = torch.tensor([[float("nan")] * 4, [0.0, float("-inf"), 0.0, float("-inf")]])
    first, second = token_logprobs(rows, [2, 1], 3)
    assert first.logprob == second.logprob == LOGPROB_FLOOR
    assert [token for token, _ in first.top] == [0, 1, 2]
    assert second.top[2] == (1, LOGPROB_FLOOR)


def test_a_prompts_last_row_scores_nothing() -> None:
    rows, tokens = logits(3, 10), [4, 5, 6, 7]
    exact = torch.log_softmax(rows, dim=-1)
    inner = chunk_logprobs(rows, [*tokens, 8], 0, 0)
    assert [wants_prompt_logprobs.logprob for wants_prompt_logprobs in inner] == pytest.approx(
        [exact[i, tokens[i + 1]].item() for i in range(3)]
    )
    assert chunk_logprobs(rows, tokens, 1, 0) == chunk_logprobs(rows[:2], tokens, 1, 0)
    assert len(chunk_logprobs(rows, tokens, 1, 0)) == 2


def chunk(length: int, *, sample: bool, all_logits: bool = False) -> SequenceChunk:
    return SequenceChunk((0,) * length, 0, (), sample, all_logits)


def test_a_step_is_taken_apart() -> None:
    chunks = [
        chunk(3, sample=True), chunk(2, sample=False, all_logits=True), chunk(5, sample=False),
        chunk(3, sample=True, all_logits=True), chunk(1, sample=True),
    ]  # fmt: skip
    rows = torch.arange(7.0)[:, None].expand(7, 4)
    sampled, prompt_logits = separate(rows, chunks)
    assert sampled[:, 0].tolist() == [0, 5, 6]
    assert [None if part is None else part[:, 0].tolist() for part in prompt_logits] == [
        None,
        [1, 2],
        None,
        [3, 4, 5],
        None,
    ]


def test_a_step_without_prompt_logprobs_is_what_it_was() -> None:
    rows = logits(2, 4)
    sampled, prompt_logits = separate(rows, [chunk(3, sample=True), chunk(9, sample=False), chunk(1, sample=True)])
    assert sampled is rows and prompt_logits == [None, None, None]


@pytest.mark.parametrize(("vocab", "most"), [(259, 1024), (49_152, 341), (128_256, 130), (262_144, 64), (10**7, 16)])
def test_a_larger_vocabulary_has_fewer_rows_a_step(vocab: int, most: int) -> None:
    assert max_prompt_logprobs(vocab) == most
