"""What a grammar allows next, over the tiny model's vocabulary of bytes: token 65 is "A", 257 and 259 end an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from common.engine.sampling.sampler import Sampler, SamplingRow
from common.grammar.grammar import Constraint, sampling_failure
from common.grammar.grammars import Grammars
from common.grammar.token_rules import TokenLimits
from common.model_files.resolve import resolve_model
from common.model_files.tiny import EOS, IM_END, VOCAB_SIZE
from common.model_files.tokenizer import Tokenizer
from common.wire.sampling_params import SamplingParams
from kernels.plain.reference import bits_allowed

ENDS = {EOS, IM_END}
PADDED = VOCAB_SIZE + 11  # rows of the model beyond its tokenizer's tokens
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}
JSON = f"start: %json {json.dumps({**SCHEMA, 'x-guidance': {'whitespace_flexible': False}})}"


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(resolve_model("tiny-random"), PADDED)
    yield made
    made.close()


def allowed(constraint: Constraint, text: str) -> set[int]:
    mask = bits_allowed(constraint.allowed(list(text.encode())), PADDED)
    assert mask.shape == (PADDED,) and mask.dtype == torch.bool
    return set(torch.nonzero(mask).flatten().tolist())


def test_each_prefix_allows_what_the_grammar_does(grammars: Grammars) -> None:
    constraint = grammars.constraint('start: "ab" ("c" | "d")*')
    assert allowed(constraint, "") == {ord("a")}
    assert allowed(constraint, "a") == {ord("b")}
    assert allowed(constraint, "ab") == {ord("c"), ord("d")} | ENDS
    assert allowed(constraint, "abdc") == {ord("c"), ord("d")} | ENDS  # two tokens since the last question
    assert constraint.problem == ""


def test_only_an_end_may_follow_a_whole_answer(grammars: Grammars) -> None:
    constraint = grammars.constraint(JSON)
    text = '{"a":22}'
    for end in range(len(text)):
        assert ord(text[end]) in allowed(constraint, text[:end]), text[:end]
    assert allowed(constraint, text) == ENDS


def test_what_follows_an_end_that_does_not_end_the_answer_is_another_end(grammars: Grammars) -> None:
    """As `ignore_eos` and `min_tokens` ask for."""
    constraint = grammars.constraint('start: "a"')
    tokens = [ord("a")]
    for _ in range(3):
        mask = bits_allowed(constraint.allowed(tokens), PADDED)
        assert set(torch.nonzero(mask).flatten().tolist()) == ENDS
        tokens.append(EOS)
    assert constraint.problem == ""


@pytest.mark.parametrize("rows", [IM_END, VOCAB_SIZE, VOCAB_SIZE + 32, VOCAB_SIZE + 1000])
def test_masks_have_as_many_bits_as_the_logits_have_rows(rows: int) -> None:
    made = Grammars(resolve_model("tiny-random"), rows)
    try:
        constraint, text, tokens = made.constraint(JSON), '{"a":22}', list[int]()
        logits = torch.zeros(1, rows)
        logits[0, VOCAB_SIZE:] = 50.0
        while not tokens or tokens[-1] not in ENDS:
            assert not constraint.problem and len(tokens) < len(text) + 2
            assert len(constraint.allowed(tokens)) == -(-rows // 32)
            sampled = SamplingRow(
                SamplingParams(max_tokens=99, temperature=2.0, seed=len(tokens)), 0, tokens, constraint=constraint
            )
            tokens.append(Sampler(rows).sample(logits, [sampled])[0].token_id)
        assert bytes(tokens[:-1]).decode() in (text, '{"a":1}') and not constraint.problem
    finally:
        made.close()


def test_a_token_without_a_row_is_never_forced() -> None:
    """The tokenizer has 49,152 tokens, many of which spell the forced text."""
    files = resolve_model("smollm2-135m")
    rows, tokenizer = 2_000, Tokenizer.from_file(files.tokenizer)
    text = "configuration management infrastructure"
    assert max(tokenizer.encode(text, add_special_tokens=False)) >= rows
    made = Grammars(files, rows)
    try:
        constraint, tokens = made.constraint(f'start: "{text}"'), list[int]()
        while set(found := torch.nonzero(bits_allowed(constraint.allowed(tokens), rows)).flatten().tolist()).isdisjoint(
            files.eos_token_ids
        ):
            assert found and all(token_id < rows for token_id in (*found, *constraint.forced(tokens)))
            tokens.append(found[0])
        assert b"".join(map(tokenizer.token_bytes, tokens)).decode() == text
    finally:
        made.close()


def test_an_answer_goes_on_elsewhere_as_it_would_have_here(grammars: Grammars) -> None:
    """The place in the grammar is a function of the tokens alone."""
    here = grammars.constraint(JSON)
    text = '{"a":2'
    step_by_step = [allowed(here, text[:end]) for end in range(len(text) + 1)]
    for end, expected in enumerate(step_by_step):
        assert allowed(grammars.constraint(JSON), text[:end]) == expected


def test_tokens_outside_of_the_grammar_are_its_problem(grammars: Grammars) -> None:
    constraint = grammars.constraint('start: "ab"')
    assert allowed(constraint, "ax") == set()
    assert "grammar" in constraint.problem and "\n" not in constraint.problem
    assert allowed(constraint, "ax") == set()
    free, held = SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, allowed_token_ids=(5,))
    assert sampling_failure(free, constraint, "decode") == ("grammar", constraint.problem)
    assert (
        sampling_failure(free, None, "decode")[0]
        == sampling_failure(free, grammars.constraint('start: "a"'), "decode")[0]
        == "decode"
    )
    phase, why = sampling_failure(held, grammars.constraint('start: "a"'), "decode")
    assert phase == "grammar" and "allowed_token_ids" in why


@pytest.mark.parametrize("wrong", ["start: nothing", "%%%", "start: /(/"])
def test_a_grammar_that_cannot_be_compiled_allows_nothing(grammars: Grammars, wrong: str) -> None:
    constraint = grammars.constraint(wrong)
    assert allowed(constraint, "") == set()
    assert constraint.problem


def test_answers_of_one_grammar_do_not_share_their_place(grammars: Grammars) -> None:
    first, second = grammars.constraint('start: "ab"'), grammars.constraint('start: "ab"')
    assert allowed(first, "a") == {ord("b")}
    assert allowed(second, "") == {ord("a")}


def test_a_model_without_an_end_token_has_no_grammars() -> None:
    files = resolve_model("tiny-random")
    grammars = Grammars(msgspec.structs.replace(files, eos_token_ids=()), 300)
    try:
        assert "no end-of-sequence token" in grammars.constraint('start: "a"').problem
    finally:
        grammars.close()


def test_what_is_forced_is_found_once_and_followed(grammars: Grammars) -> None:
    """It may be a hundred thousand characters, and is asked for behind each token."""
    text = "x" * 50
    constraint = grammars.constraint(f'start: "{text}" /[ab]/')
    for end in range(50):
        assert constraint.forced(list(text[:end].encode())) == list(text[end:].encode())
    assert constraint.forced(list(text.encode())) == []
    other = grammars.constraint('start: "ab" | "xbcd"')
    assert other.forced([]) == [] and other.forced([ord("x")]) == list(b"bcd")


def row(constraint: Constraint, output: str = "", *, banned: tuple[int, ...] = (), **fields: object) -> SamplingRow:
    params = SamplingParams(**{"max_tokens": 9, **fields})  # type: ignore[arg-type]
    return SamplingRow(params, len(output), list(output.encode()), (), TokenLimits(banned), constraint)


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 1.5}, {"temperature": 1.0, "top_k": 1}])
def test_only_what_is_allowed_is_sampled(grammars: Grammars, fields: dict[str, object]) -> None:
    logits = torch.zeros(1, PADDED)
    logits[0, ord("x")] = 50.0
    logits[0, PADDED - 1] = 60.0  # no token of the tokenizer
    sampler = Sampler(PADDED)
    assert sampler.sample(logits, [row(grammars.constraint('start: "a" /[b-d]/'), **fields)])[0].token_id == ord("a")
    (second,) = sampler.sample(logits, [row(grammars.constraint('start: "a" /[b-d]/'), "a", **fields)])
    assert second.token_id in range(ord("b"), ord("e"))


def test_a_banned_end_comes_where_nothing_else_may(grammars: Grammars) -> None:
    """`min_tokens` cannot lengthen an answer that is whole."""
    logits, ends = torch.zeros(1, PADDED), tuple(ENDS)
    for temperature in (0.0, 1.0, 0.0001):
        whole = row(grammars.constraint('start: "a"'), "a", banned=ends, temperature=temperature)
        assert Sampler(PADDED).sample(logits, [whole])[0].token_id in ENDS
        open_ended = row(grammars.constraint('start: "a" "b"?'), "a", banned=ends, temperature=temperature)
        assert Sampler(PADDED).sample(logits, [open_ended])[0].token_id == ord("b")


def test_where_nothing_is_allowed_no_token_is_sampled_and_others_are(grammars: Grammars) -> None:
    logits = torch.zeros(2, PADDED)
    logits[1, 7] = 1.0
    plain = SamplingRow(SamplingParams(max_tokens=1, temperature=0.0), 0)
    lost, good = Sampler(PADDED).sample(logits, [row(grammars.constraint("start: nothing")), plain])
    assert lost.token_id >= PADDED and good.token_id == 7


def test_of_logits_that_are_not_numbers_no_token_is_sampled(grammars: Grammars) -> None:
    logits = torch.full((1, PADDED), float("nan"))
    (token,) = Sampler(PADDED).sample(logits, [row(grammars.constraint('start: "a"'), temperature=0.0)])
    assert token.token_id >= PADDED


@pytest.mark.slow
def test_the_vocabulary_of_a_real_model() -> None:
    """Tokens of many bytes, whose beginnings and ends are parts of different members."""
    files = resolve_model("smollm2-135m")
    tokenizer, grammars = Tokenizer.from_file(files.tokenizer), Grammars(files, files.vocab_size)
    try:
        constraint = grammars.constraint(JSON)
        ids = tokenizer.encode('{"a":22}', add_special_tokens=False)
        for end, token_id in enumerate(ids):
            assert bool(bits_allowed(constraint.allowed(ids[:end]), files.vocab_size)[token_id]), tokenizer.decode(
                ids[: end + 1]
            )
        mask = bits_allowed(constraint.allowed(ids), files.vocab_size)
        assert set(torch.nonzero(mask).flatten().tolist()) == set(files.eos_token_ids)
    finally:
        grammars.close()


def test_forced_text_that_spells_a_special_token_is_text(grammars: Grammars) -> None:
    constraint, text = grammars.constraint('start: "a" TEXT\nTEXT: "<|pad|>"\n'), list(b"a<|pad|>")
    for end, token_id in enumerate(text):
        allowed = bits_allowed(constraint.allowed(text[:end]), PADDED)
        assert torch.nonzero(allowed).flatten().tolist() == [token_id]
    assert grammars.constraint('start: "a" "<|pad|>"\n').forced([]) == text


def test_a_damaged_tokenizer_is_a_problem_of_the_requests_that_need_it(tmp_path: Path) -> None:
    files = msgspec.structs.replace(resolve_model("tiny-random"), tokenizer=tmp_path / "none.json")
    grammars = Grammars(files, PADDED)
    try:
        assert "none.json" in grammars.constraint('start: "a"').problem
    finally:
        grammars.close()
