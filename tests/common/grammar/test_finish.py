"""The rule by which both kinds of worker end a sequence."""

from __future__ import annotations

import pytest

from common.grammar.token_rules import banned_tokens, finish_reason
from common.wire.sampling_params import SamplingParams

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
