from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.wire.sampling_params import SamplingParams, TokenLogprobs
from router.dispatch.client import GenerationRequest, TokenEvent
from router.generation.choice import AnswerChoice
from router.text.detokenizer import Detokenizer
from router.text.stop_strings import StopScanner

from ...examples import examples

output = st.text("ab é🙂", min_size=1, max_size=12).map(lambda text: list(text.encode()))
stop_strings = st.lists(st.text("ab é", min_size=1, max_size=3), max_size=3)
cuts = st.lists(st.integers(1, 4), min_size=1, max_size=12)


def run(
    text: Any, ids: list[int], sizes: list[int], stops: list[str], with_logprobs: bool, **options: Any
) -> dict[str, Any]:
    """The output of a choice for `ids` in events of these sizes (the last one repeats)."""
    params = SamplingParams(max_tokens=len(ids), min_tokens=options.pop("min_tokens", 0))
    scanner = StopScanner(stops, include_stop=options.get("include_stop", False)) if stops else None
    request = GenerationRequest("request", [1], params)
    choice = AnswerChoice(0, 0, request, Detokenizer(text.tokenizer), scanner, **options)
    out: dict[str, Any] = {"text": "", "ids": [], "tokens": [], "spans": []}
    sizes = list(sizes)
    start = 0
    while not choice.finish_reason:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        part = tuple(ids[start : start + size])
        start += size
        logprobs = tuple(TokenLogprobs(-1.0) for _ in part) if with_logprobs else ()
        piece = choice.push(TokenEvent(part, logprobs, "length" if start >= len(ids) else ""))
        out["text"] += piece.text
        out["ids"] += piece.token_ids
        out["tokens"] += [token.token_id for token in piece.with_logprobs]
        out["spans"] += [(token.start, token.end) for token in piece.with_logprobs]
    return out | {"reason": choice.finish_reason, "count": choice.num_tokens}


@pytest.mark.slow
@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ids=output, sizes=cuts, stops=stop_strings, with_logprobs=st.booleans(), keep=st.booleans(), least=st.integers(0, 6)
)
def test_how_tokens_are_divided_into_events_changes_nothing(
    text: Any, ids: list[int], sizes: list[int], stops: list[str], with_logprobs: bool, keep: bool, least: int
) -> None:
    one_by_one = run(text, ids, [1], stops, with_logprobs, include_stop=keep, min_tokens=least)
    assert run(text, ids, sizes, stops, with_logprobs, include_stop=keep, min_tokens=least) == one_by_one
    assert one_by_one["count"] == len(one_by_one["ids"])
    assert text.tokenizer.decode(ids).startswith(one_by_one["text"])
    if one_by_one["reason"] == "length":
        assert (one_by_one["text"], one_by_one["ids"]) == (text.tokenizer.decode(ids), ids)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=output, sizes=cuts, stops=stop_strings)
def test_logprobs_are_those_of_the_text(text: Any, ids: list[int], sizes: list[int], stops: list[str]) -> None:
    out = run(text, ids, sizes, stops, True)
    assert out["tokens"] == ids[: len(out["tokens"])]
    assert all(start <= end and start <= len(out["text"]) for start, end in out["spans"])
    if out["reason"] == "length":
        assert len(out["tokens"]) == len(ids)


def first_stop(text: str, stops: list[str], least: int) -> int | None:
    """The end of the first stop string that is complete after more than `least` characters, each of them a token."""
    ends = range(least + 1, len(text) + 1)
    return next((end for end in ends if any(text[:end].endswith(stop) for stop in stops)), None)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    answer=st.text("ab ", min_size=1, max_size=12),
    sizes=cuts,
    stops=st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=3),
    least=st.integers(0, 8),
)
def test_a_stop_string_counts_if_it_ends_after_min_tokens(
    text: Any, answer: str, sizes: list[int], stops: list[str], least: int
) -> None:
    """It may begin within the first `min_tokens` tokens."""
    end = first_stop(answer, stops, least)
    out = run(text, list(answer.encode()), sizes, stops, False, min_tokens=least, include_stop=True)
    assert (out["text"], out["reason"]) == ((answer, "length") if end is None else (answer[:end], "stop"))


def test_a_stop_string_that_begins_within_min_tokens_is_cut_out(text: Any) -> None:
    out = run(text, list(b"The quick fox"), [1], ["quick"], False, min_tokens=6)
    assert (out["text"], out["reason"], out["count"]) == ("The ", "stop", 9)
