"""What a beam search does not take."""

from __future__ import annotations

from collections.abc import Mapping

from common.errors import InvalidRequest
from common.wire import MAX_LOGIT_BIAS, PENALTIES, default_of
from router.request.extensions import Extensions

CHANGES_SCORES: Mapping[str, object] = {
    **{name: default_of(name) for name in PENALTIES},
    "logit_bias": None,
}
"""Fields that would change the log-probabilities by which beams compete, with the values that change nothing."""
NEEDS_ONE_ANSWER: Mapping[str, object] = {
    **dict.fromkeys(("structured_outputs", "response_format", "tools")),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar")),
    **dict.fromkeys(("json_schema", "grammar", "regex", "ebnf")),
    "thinking_token_budget": -1,
}
"""Fields that a worker keeps along an answer; each step of a search is an answer of its own, of one token."""
MAX_ALLOWED = MAX_LOGIT_BIAS
"""Allowed tokens of a search: a step asks for the log-probability of each."""


def check_beams(fields: Extensions, num_alternatives: int | None) -> None:
    """Raises InvalidRequest for what a beam search cannot do. `num_alternatives` are those that its answer shows."""
    _refuse(fields, CHANGES_SCORES, "beams compete by the model's own log-probabilities")
    _refuse(fields, NEEDS_ONE_ANSWER, "each token of a beam is an answer of its own")
    _refuse(fields, {"logprob_token_ids": None}, "a search asks for the likeliest tokens")
    allowed = fields.allowed_token_ids or ()
    if len(allowed) > MAX_ALLOWED:
        raise InvalidRequest(
            f"allowed_token_ids: must be at most {MAX_ALLOWED:,} with use_beam_search (got {len(allowed):,})",
            param="allowed_token_ids",
        )
    if allowed and num_alternatives:  # a worker reports the likeliest tokens or the allowed ones, not both
        name = "top_logprobs" if "top_logprobs" in type(fields).model_fields else "logprobs"
        raise InvalidRequest(
            f"{name}: must be 0 with use_beam_search and allowed_token_ids (got {num_alternatives})", param=name
        )


def _refuse(fields: Extensions, lacking: Mapping[str, object], why: str) -> None:
    for name, same in lacking.items():
        if getattr(fields, name, None) not in (None, same, [], {}):
            raise InvalidRequest(f"{name}: not allowed with use_beam_search: {why}", param=name)
