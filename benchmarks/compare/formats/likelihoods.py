"""Likelihoods of given tokens, and the greedy tokens beside them, from a running server of llama.cpp.

The server tells no likelihoods of a prompt. It is asked for one token behind each beginning of a sequence, and a bias
forces that token to be the sequence's next one. It reports the token's likelihood, and the likeliest token, without the
bias. Its cache holds the beginning but for the last token, so each token is computed as a decode step computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx
import torch
from torch import Tensor

from benchmarks.accuracy import Reference
from benchmarks.compare.peer import PeerError

FORCE: Final = 1e5  # far above any logit
TIMEOUT_S: Final = 900.0  # also of a machine that others keep busy


@dataclass(frozen=True, slots=True)
class PeerScores:
    """A peer on a reference: log-likelihoods of the passage, float64 [T - 1], and greedy agreement, 0 .. 1."""

    logprobs: Tensor
    agreement: float


def score_server(client: httpx.Client, reference: Reference, read: Callable[[int], None]) -> PeerScores:
    """Score the server at the client's base URL; `read` hears of each token. Raises PeerError."""
    same, total = 0, 0
    for answer in reference.answers:
        expected = answer.expected.argmax(-1).tolist()
        read(answer.num_prompt)
        for place, token in zip(range(answer.num_prompt, len(answer.token_ids)), expected, strict=True):
            same += next_token(client, answer.token_ids[:place], answer.token_ids[place])[1] == token
            total += 1
            read(1)
    read(1)
    logprobs = []
    for place in range(1, len(reference.passage)):
        logprobs.append(next_token(client, reference.passage[:place], reference.passage[place])[0])
        read(1)
    return PeerScores(torch.tensor(logprobs, dtype=torch.float64), same / total)


def next_token(client: httpx.Client, token_ids: Sequence[int], following: int) -> tuple[float, int]:
    """The log-likelihood of `following` behind these tokens, and the likeliest token there. Raises PeerError."""
    body = {
        "prompt": list(token_ids),
        "n_predict": 1,
        "n_probs": 1,
        "temperature": 0,
        "logit_bias": [[following, FORCE]],
        "cache_prompt": True,
    }
    try:
        reply = client.post("/completion", json=body, timeout=TIMEOUT_S)
    except httpx.TransportError as error:
        raise PeerError(f"llama.cpp did not answer: {error!r}") from error
    if reply.status_code != httpx.codes.OK:
        raise PeerError(f"llama.cpp answered {reply.status_code}: {reply.text[:300]}")
    return _read(reply.json(), len(token_ids), following)


def _read(reply: Any, num_tokens: int, following: int) -> tuple[float, int]:
    try:
        evaluated, (found,) = reply["tokens_evaluated"], reply["completion_probabilities"]
        token, logprob, likeliest = found["id"], float(found["logprob"]), int(found["top_logprobs"][0]["id"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise PeerError(f"llama.cpp's answer has no likelihoods: {str(reply)[:300]}") from error
    if (evaluated, token) != (num_tokens, following):
        raise PeerError(f"llama.cpp read {evaluated} tokens of {num_tokens} and chose {token} instead of {following}")
    return logprob, likeliest
