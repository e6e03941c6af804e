"""Requests in vLLM's terms: what does not need vLLM itself."""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace

import llguidance
import pytest

from common.engine.vllm import requests
from common.engine.vllm.requests import (
    TokenRules,
    as_lark,
    checked_prompt,
    needs_rules,
    seed_at,
    token_logprobs,
    unsupported,
)
from common.errors import WireError
from common.wire import LOGPROB_FLOOR, BadWord, Pooling, SamplingParams, ThinkingBudget, TokenLogprobs, pack_tokens
from router.text.answer_grammar import json_grammar


def params(**given: object) -> SamplingParams:
    return SamplingParams(max_tokens=8, **given)


@pytest.mark.parametrize(
    ("given", "speculates", "words"),
    [
        (params(pooling="last"), False, "requires pooling 'last', but this worker generates text"),
        (params(logprob_token_ids=tuple(range(129))), False, "has 129 tokens, the maximum with --engine vllm is 128"),
        (params(min_p=0.1), True, "min_p is not supported by --engine vllm with --speculative-config: omit it"),
        (params(logit_bias=((1, 2.0),)), True, "logit_bias"),
        (params(bad_words=(BadWord.of([1]),)), True, "bad_words"),
        (params(thinking=ThinkingBudget(3, (1,))), True, "thinking_token_budget"),
        (params(presence_penalty=1.0), True, "presence_penalty"),
        (params(frequency_penalty=1.0), True, "frequency_penalty"),
        (params(logprobs=1, logprob_token_ids=(1,)), True, "logprob_token_ids"),
        (params(repetition_penalty=1.5, logprobs=1, min_tokens=2, allowed_token_ids=(1,)), True, ""),
        (params(presence_penalty=1.0, min_p=0.1, bad_words=(BadWord.of([1]),)), False, ""),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_name(given: SamplingParams, speculates: bool, words: str) -> None:
    why = unsupported(given, speculates=speculates, pooling="")
    assert words in why and bool(why) == bool(words)


def test_the_first_model_runner_has_no_logprobs_of_chosen_tokens() -> None:
    """One request with them changes the log probabilities of all others in its batch."""
    given = params(logprobs=1, logprob_token_ids=(1,))
    assert not unsupported(given, speculates=False)
    why = unsupported(given, speculates=False, has_first_runner=True)
    assert why.startswith("logprob_token_ids, and allowed_token_ids in a beam search, are not supported by")
    assert not unsupported(params(logprobs=1), speculates=False, has_first_runner=True)


@pytest.mark.parametrize("nests", [False, True])
def test_json_has_little_white_space(nests: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
    grammar = json_grammar(schema)
    if nests:
        named = {"name": "form", "lark_grammar": grammar}
        grammar = json.dumps({"grammars": [{"lark_grammar": "start: @form\n"}, named]})
    tokenizer = llguidance.LLTokenizer("byte")

    def is_valid(text: bytes) -> bool:
        matcher = llguidance.LLMatcher(tokenizer, as_lark(grammar))
        assert not matcher.get_error()
        return bool(matcher.try_consume_tokens(list(text)) == len(text))

    assert is_valid(b'{"a":"x"}') and is_valid(b'{"a": "x"}')
    assert not is_valid(b'{"a":  "x"') and not is_valid(b"{  ")


def test_a_model_that_pools_prompts_serves_nothing_else() -> None:
    def refusal(pooling: Pooling) -> str:
        return unsupported(params(pooling=pooling), speculates=False, pooling="mean")

    assert not refusal("mean")
    assert refusal("last") == "the request requires pooling 'last', but this worker supports pooling 'mean'"
    assert refusal("") == "the request requires generated text, but this worker supports pooling 'mean'"


def test_no_parameter_is_ignored() -> None:
    source = inspect.getsource(requests)
    assert [name for name in SamplingParams.__struct_fields__ if f"params.{name}" not in source] == []


def test_earlier_output_needs_our_rules_only_for_what_depends_on_it() -> None:
    assert not needs_rules(params(presence_penalty=1.0), 0)  # vLLM's own
    assert needs_rules(params(presence_penalty=1.0), 1)
    assert not needs_rules(params(repetition_penalty=1.5), 1)  # counts prompts too
    assert needs_rules(params(bad_words=(BadWord.of([1]),)), 0)


def test_seeds_differ_after_earlier_output() -> None:
    assert seed_at(7, 0) == 7
    assert len({seed_at(7, earlier) for earlier in range(50)}) == 50
    assert seed_at(-1, 0) != -1
    assert all(-(2**63) <= seed_at(7, earlier) < 2**63 for earlier in range(50))


def test_rules_survive_the_way_to_the_ranks() -> None:
    import msgspec

    given = params(bad_words=(BadWord.of([1, 2]),), thinking=ThinkingBudget(3, (1,), (4,)))
    rules = TokenRules(start=5, params=msgspec.msgpack.encode(given))
    packed = msgspec.msgpack.encode({"diptych_rules": msgspec.to_builtins(rules, builtin_types=(bytes,))})
    found = TokenRules.of(msgspec.msgpack.decode(packed))
    assert found is not None and found.start == 5 and found.sampling == given
    assert TokenRules.of(None) is None


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" /[0-9]+/\n',
        json.dumps(
            {"grammars": [{"lark_grammar": 'start: "x" @form\n'}, {"name": "form", "lark_grammar": "start: /}/"}]}
        ),
        json.dumps({"grammars": [{"lark_grammar": "start: @a-b\n"}, {"name": "a-b", "json_schema": {"const": "}{"}}]}),
        json.dumps({"grammars": [{"json_schema": {"type": "object"}}]}),
    ],
)
def test_grammars_become_one_text_that_vllm_passes_on(grammar: str) -> None:
    text = as_lark(grammar)
    assert llguidance.grammar_from("grammar", text) == text
    assert not llguidance.LLMatcher.validate_grammar(text)


def test_prompts_are_checked() -> None:
    assert checked_prompt(pack_tokens([1, 2]), 1, vocab_size=9, max_prompt_len=2) == [1, 2]
    for tokens, earlier, words in (
        ([], 0, "empty"),
        ([1, 2, 3], 0, "maximum is 2"),
        ([9], 0, "outside"),
        ([1], 1, "invalid"),
    ):
        with pytest.raises(WireError, match=words):
            checked_prompt(pack_tokens(tokens), earlier, vocab_size=9, max_prompt_len=2)


def test_alternatives_are_those_asked_for() -> None:
    found = {5: one(-3.0, 9), 1: one(-0.1, 1), 2: one(-1.0, 2), 3: one(float("-inf"), 3)}
    assert token_logprobs(5, found, 2) == TokenLogprobs(-3.0, ((1, -0.1), (2, -1.0)), 9)
    assert token_logprobs(5, found, 0).top == ()
    by_id = token_logprobs(5, found, 1, (3, 2))
    assert by_id.top == ((2, -1.0), (3, LOGPROB_FLOOR))


def one(logprob: float, rank: int) -> SimpleNamespace:
    return SimpleNamespace(logprob=logprob, rank=rank)
