"""What a prompt's log-probabilities must be: a plain forward pass, in one piece, and torch's log-softmax."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from common.engine.models.decoder import Decoder
from common.wire.messages import PromptLogprobs
from common.wire.sampling_params import TokenLogprobs

from .oracle import Oracle


def true_logprobs(model: Decoder, token_ids: Sequence[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Log-probabilities [len(token_ids) - 1, vocab_size] of what follows each token but the last."""
    oracle = Oracle(model, dtype)
    return torch.log_softmax(oracle.forward(token_ids, oracle.empty_cache())[:-1], dim=-1)


def check_logprobs(found: Sequence[TokenLogprobs], model: Decoder, token_ids: Sequence[int], count: int) -> None:
    """All tokens but the first have log-probabilities, those of the oracle, and the alternatives are the best ones."""
    exact = true_logprobs(model, token_ids)
    assert len(found) == len(exact)
    for row, token_id, entry in zip(exact, token_ids[1:], found, strict=True):
        assert entry.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        assert [p for _, p in entry.top] == pytest.approx(torch.topk(row, count).values.tolist(), abs=1e-4)
        assert [p for _, p in entry.top] == pytest.approx([row[i].item() for i, _ in entry.top], abs=1e-4)


def joined(messages: Sequence[PromptLogprobs]) -> list[TokenLogprobs]:
    """Parts of one attempt, which follow each other without gap or repetition."""
    logprobs: list[TokenLogprobs] = []
    for message in messages:
        assert message.start == 1 + len(logprobs)
        logprobs.extend(message.logprobs)
    return logprobs
