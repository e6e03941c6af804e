"""Sampling parameters: which of them a row may have that the host does not prepare, and bounds for other checks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from common.wire import PENALTIES, SamplingParams, bounds_of, default_of
from common.wire.sampling_params import PLAIN

PREPARED = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": ((3, 1.0),),
    "logprobs": 0,
    "grammar": "x",
    "allowed_token_ids": (3,),
    "bad_words": ((b"", 3),),
    "thinking": ((), (3,)),
}


def test_every_parameter_is_plain_or_prepared() -> None:
    assert {*PLAIN, *PREPARED} == {*SamplingParams.__struct_fields__}
    assert not PREPARED.keys() & {*PLAIN}


@pytest.mark.parametrize(("name", "value"), PREPARED.items())
def test_a_row_with_it_is_not_plain(name: str, value: Any) -> None:
    params = SamplingParams(max_tokens=8, **{name: value})
    assert not params.is_plain
    assert params.has_penalties == (name in PENALTIES)


def test_a_draw_is_plain() -> None:
    params = SamplingParams(max_tokens=8, temperature=0.5, top_p=0.5, top_k=3, min_p=0.1, seed=7, min_tokens=2)
    assert params.is_plain
    assert not params.has_penalties


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("top_p", {"gt": 0, "le": 1}),
        ("repetition_penalty", {"ge": 0.01, "le": 10}),
        ("seed", {"ge": -(2**63), "le": 2**63 - 1}),
    ],
)
def test_bounds_are_those_that_the_wire_checks(name: str, bounds: dict[str, float]) -> None:
    assert bounds_of(name) == bounds
    values = {"max_tokens": 1, name: bounds["le"] + 1}
    message = [values.get(field, default_of(field)) for field in SamplingParams.__struct_fields__]
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(message, SamplingParams)
