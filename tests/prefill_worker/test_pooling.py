"""Vectors of prompts, made by a prefill worker whose model has no head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from common.wire.messages import AbortRequest, PooledOutput, TokenOutput

from ..engine_rig import ROUTER, prompt
from ..oracle import Oracle

Rig = Any  # EngineRig of conftest, which test modules cannot import
LENGTHS = (1, 2, 15, 16, 17, 33, 65, 100)
NEVER = float("nan")


@pytest.fixture(scope="module")
def hidden(tiny: Any) -> Callable[[list[int]], torch.Tensor]:
    """The hidden states of a prompt in one piece, in float64."""
    oracle = Oracle(tiny[0], torch.float64)
    oracle.head = torch.eye(tiny[0].config.hidden_size, dtype=torch.float64)
    return lambda tokens: oracle.forward(tokens, oracle.empty_cache())


def vectors(rig: Rig, name: str = "a") -> list[np.ndarray]:
    told = [message for _, message in rig.sent if isinstance(message, PooledOutput) and message.request_id == name]
    return [np.frombuffer(message.values, "<f4") for message in told]


@pytest.mark.parametrize("budget", [7, 48, 512])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_the_oracles_whatever_the_batch_and_chunks(
    make_pooling_engine: Callable[..., Rig], hidden: Any, pooling: str, budget: int
) -> None:
    rig = make_pooling_engine(pooling, budget=budget)
    prompts = {f"r{length}": prompt(length, length) for length in LENGTHS}
    for name, tokens in prompts.items():
        rig.ask(tokens, name, pooling=pooling)
    rig.until(lambda: rig.is_clean)
    for name, tokens in prompts.items():
        exact = hidden(tokens)[-1] if pooling == "last" else hidden(tokens).mean(0)
        (found,) = vectors(rig, name)
        assert found == pytest.approx(exact.numpy(), abs=1e-5)
        (end,) = rig.deltas(name)
        assert (end.token_ids, end.finish_reason) == ((), "stop")


def test_a_vector_comes_before_the_end(make_pooling_engine: Callable[..., Rig]) -> None:
    rig = make_pooling_engine()
    rig.ask(prompt(20), pooling="last")
    rig.until(lambda: rig.is_clean)
    assert [type(message) for router, message in rig.sent if router == ROUTER] == [PooledOutput, TokenOutput]


@pytest.mark.parametrize(("pooling", "cached"), [("last", 64), ("mean", 0)])
def test_the_cache_serves_all_but_the_last_token_and_no_mean(
    make_pooling_engine: Callable[..., Rig], hidden: Any, pooling: str, cached: int
) -> None:
    rig, tokens = make_pooling_engine(pooling), prompt(70)
    for name in ("a", "b"):
        rig.ask(tokens, name, pooling=pooling)
        rig.until(lambda: rig.is_clean)
    assert [rig.deltas(name)[0].num_cached_tokens for name in ("a", "b")] == [0, cached]
    exact = hidden(tokens)[-1] if pooling == "last" else hidden(tokens).mean(0)
    assert vectors(rig, "b")[0] == pytest.approx(exact.numpy(), abs=1e-5)


def test_another_attempt_begins_its_mean_anew(make_pooling_engine: Callable[..., Rig], hidden: Any) -> None:
    rig, tokens = make_pooling_engine("mean"), prompt(100)
    rig.ask(tokens, pooling="mean")
    rig.turn(2)
    assert not vectors(rig)
    rig.ask(tokens, attempt=1, pooling="mean")
    rig.until(lambda: rig.is_clean)
    (found,) = vectors(rig)
    assert found == pytest.approx(hidden(tokens).mean(0).numpy(), abs=1e-5)


def test_an_abort_leaves_nothing(make_pooling_engine: Callable[..., Rig]) -> None:
    rig = make_pooling_engine("mean")
    rig.ask(prompt(100), pooling="mean")
    rig.turn(2)
    rig.tell(AbortRequest(request_id="a", attempt=0))
    rig.until(lambda: rig.is_clean)
    assert not vectors(rig) and not rig.deltas()


def test_a_head_makes_one_number(make_pooling_engine: Callable[..., Rig], hidden: Any) -> None:
    head = torch.randn(1, hidden([1]).shape[1], generator=torch.Generator().manual_seed(3))
    rig, tokens = make_pooling_engine("last", head), prompt(50)
    rig.ask(tokens, pooling="last")
    rig.until(lambda: rig.is_clean)
    (found,) = vectors(rig)
    assert found == pytest.approx((hidden(tokens)[-1] @ head.T.double()).numpy(), abs=1e-4)


def test_what_is_not_finite_fails_its_request_alone(make_pooling_engine: Callable[..., Rig]) -> None:
    rig = make_pooling_engine("last", torch.full((1, make_pooling_engine().model.config.hidden_size), NEVER))
    rig.ask(prompt(20), pooling="last")
    rig.until(lambda: rig.is_clean)
    (failed,) = rig.failures()
    assert not failed.retryable and "not finite" in failed.message and not vectors(rig)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "requires generated text, but this worker supports pooling 'mean'"),
        ({"pooling": "last"}, "requires pooling 'last', but this worker supports pooling 'mean'"),
        ({"pooling": "mean", "remote": True}, "must not have a decode worker"),
    ],
)
def test_other_requests_are_refused(make_pooling_engine: Callable[..., Rig], options: dict[str, Any], why: str) -> None:
    rig = make_pooling_engine("mean")
    rig.ask(prompt(20), **options)
    rig.until(lambda: rig.is_clean)
    (failed,) = rig.failures()
    assert why in failed.message and not failed.retryable


def test_a_worker_that_generates_refuses_to_pool(make_engine: Callable[..., Rig]) -> None:
    rig = make_engine()
    rig.ask(prompt(20), pooling="last")
    rig.until(lambda: rig.is_clean)
    (failed,) = rig.failures()
    assert "requires pooling 'last', but this worker generates text" in failed.message
