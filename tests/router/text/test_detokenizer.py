"""The pieces of a streamed text together are the full decode, for every family of tokenizers."""

from __future__ import annotations

from functools import lru_cache

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from common.model_files.resolve import resolve_model
from common.model_files.tokenizer import Tokenizer
from router.text.detokenizer import Detokenizer, Joining, token_table

MODELS = ["tiny-random", "smollm2-135m", pytest.param("gemma3-270m", marks=pytest.mark.slow)]
BYTES_OF_GEMMA3 = st.integers(238, 238 + 255)


@lru_cache
def load(name: str) -> Tokenizer:
    return Tokenizer.from_file(resolve_model(name).tokenizer)


def streamed(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True, step: int = 1) -> str:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    assert detokenizer.position >= sum(map(len, pieces))
    text = "".join(pieces) + detokenizer.flush()
    assert detokenizer.position == len(text)
    return text


@pytest.mark.slow_cases("smollm2-135m")
@pytest.mark.parametrize("name", MODELS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_random_ids(name: str, data: st.DataObject) -> None:
    tokenizer = load(name)
    few_bytes = BYTES_OF_GEMMA3 if name.startswith("gemma") else st.integers(0, 300)
    ids = data.draw(st.lists(st.one_of(few_bytes, st.integers(0, tokenizer.vocab_size + 9)), max_size=40))
    skip, step = data.draw(st.booleans()), data.draw(st.integers(1, 4))
    assert streamed(tokenizer, ids, skip=skip, step=step) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", MODELS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text(max_size=60))
def test_any_text(name: str, text: str) -> None:
    tokenizer = load(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert streamed(tokenizer, ids, skip=False) == tokenizer.decode(ids, skip_special_tokens=False)


@given(ids=st.lists(st.integers(0, 280), max_size=40), family=st.sampled_from(["gemma_like", "llama2_like"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_byte_fallback_of_both_families(tokenizer_of: dict[str, Tokenizer], ids: list[int], family: str) -> None:
    tokenizer = tokenizer_of[family]
    assert token_table(tokenizer).joining is Joining.RUNS
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


def test_half_a_character_is_held_back() -> None:
    detokenizer = Detokenizer(load("tiny-random"))
    assert [detokenizer.push([byte]) for byte in "aé€".encode()] == ["a", "", "é", "", "", "€"]
    assert detokenizer.push([0xF0, 0x9F]) == "" and detokenizer.flush() == "\ufffd"


def test_other_decoders_join_by_context() -> None:
    inner = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "un": 1, "##happy": 2, "cat": 3}, unk_token="[UNK]"))
    inner.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(inner)
    assert token_table(tokenizer).joining is Joining.CONTEXT
    assert streamed(tokenizer, [1, 2, 3, 1, 2, 0]) == tokenizer.decode([1, 2, 3, 1, 2, 0])


@pytest.mark.parametrize("name", [pytest.param("tiny-random", marks=pytest.mark.slow), "smollm2-135m"])
def test_a_long_text_is_streamed_in_linear_time(name: str) -> None:
    ids = load(name).encode("é cat 😀 ") * 20_000  # a decode of everything per token would take hours
    assert streamed(load(name), ids) == load(name).decode(ids)


def test_positions_are_where_tokens_begin() -> None:
    detokenizer, positions = Detokenizer(load("tiny-random")), []
    for byte in "aé€b".encode():
        positions.append(detokenizer.position)
        detokenizer.push([byte])
    assert positions == [0, 1, 1, 2, 2, 2, 3]


def test_positions_within_a_run_of_byte_tokens(tokenizer_of: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizer_of["gemma_like"]
    detokenizer, positions = Detokenizer(tokenizer), []
    for token_id in tokenizer.encode("a\x01é\x02b"):  # "é" has a token, the control characters are bytes
        positions.append(detokenizer.position)
        detokenizer.push([token_id])
    assert positions == [0, 1, 2, 3, 4]


def test_control_tokens_are_text_only_when_asked_for() -> None:
    tokenizer = load("tiny-random")
    assert Detokenizer(tokenizer).push([97, 257, 98]) == "ab"
    assert Detokenizer(tokenizer, skip_special_tokens=False).push([97, 257, 98]) == "a<|eos|>b"
