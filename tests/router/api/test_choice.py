from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.wire.sampling_params import SamplingParams, TokenLogprobs
from router.generation.choices.choice import AnswerChoice
from router.streams.client import GenerationRequest, TokenEvent
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
