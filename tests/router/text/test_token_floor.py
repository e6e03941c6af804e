from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.model_files.resolve import resolve_model
from common.model_files.tokenizer import Tokenizer
from router.text.token_floor import TokenFloor, token_floor

MODELS = ["tiny-random", "smollm2-135m", pytest.param("gemma3-270m", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=MODELS)
def floored(request: pytest.FixtureRequest) -> tuple[Tokenizer, TokenFloor]:
    path = resolve_model(request.param).tokenizer
    tokenizer = Tokenizer.from_file(path)
    return tokenizer, token_floor(path, tokenizer)


@pytest.mark.slow_cases("smollm2-135m")
@given(text=st.one_of(st.text(), st.text(alphabet=" =-\n\x04", max_size=300)), times=st.integers(1, 20))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_text_has_fewer_tokens(floored: tuple[Tokenizer, TokenFloor], text: str, times: int) -> None:
    tokenizer, floor = floored
    assert floor.of(text * times) <= len(tokenizer.encode(text * times, add_special_tokens=False))


def test_long_texts_are_recognised(floored: tuple[Tokenizer, TokenFloor]) -> None:
    assert floored[1].of("word " * 1_000_000) >= 5_000_000 // 81


@pytest.mark.slow
def test_bytes_that_the_vocabulary_lacks_do_not_count() -> None:
    path = resolve_model("smollm2-135m").tokenizer
    tokenizer = Tokenizer.from_file(path)
    assert tokenizer.encode("\x04" * 1000) == [] and token_floor(path, tokenizer).of("\x04" * 1000) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"truncation": {"max_length": 9, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}},
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": ""}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": "a"}, "behavior": "Removed", "invert": False}},
        {"added_tokens": [{"id": 256, "content": "<|bos|>", "rstrip": True}]},
        {"model": {"type": "WordLevel"}},
        {"model": 3},
    ],
)
def test_nothing_is_claimed_of_tokenizers_that_lose_text(change: dict[str, Any], tmp_path: Path) -> None:
    original = resolve_model("tiny-random").tokenizer
    changed = tmp_path / "tokenizer.json"
    changed.write_text(json.dumps({**json.loads(original.read_bytes()), **change}))
    assert token_floor(changed, Tokenizer.from_file(original)).of("x" * 10_000) == 0


def test_composing_normalizers_are_allowed_for(tmp_path: Path) -> None:
    original = resolve_model("tiny-random").tokenizer
    changed = tmp_path / "tokenizer.json"
    normalizer = {"type": "Sequence", "normalizers": [{"type": "NFC"}]}
    changed.write_text(json.dumps({**json.loads(original.read_bytes()), "normalizer": normalizer}))
    tokenizer = Tokenizer.from_file(changed)
    text = "\u1112\u1161\u11ab" * 1000  # three jamo, nine bytes, that compose to one syllable of three
    assert 0 < token_floor(changed, tokenizer).of(text) <= len(tokenizer.encode(text)) == 3000
