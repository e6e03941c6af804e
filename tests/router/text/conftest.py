"""Two small tokenizers, one of each family, and the tiny model's text pipeline."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import tokenizers

from common.model_files.files import ModelFiles
from common.model_files.resolve import resolve_model
from common.model_files.tiny import make_tiny_model
from common.model_files.tokenizer import Tokenizer
from router.text.text_pipeline import TextPipeline

SPECIAL = ("<s>", "</s>", "<|end|>")
WORDS = ("▁", "▁the", "▁cat", "s", "at", "▁sat", "é", "漢", "🙂", "▁▁", "\n", "a", "b", "c", "ab", "bc")


def _sentence_piece(strip: bool) -> Tokenizer:
    """Special tokens, `<0x00>` to `<0xFF>`, then words; with `strip` as Llama 2 decodes, else as Gemma does."""
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if strip:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": token, **flags} for i, token in enumerate(SPECIAL)],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [["a", "b"], ["b", "c"]],
            "byte_fallback": True,
        },
    }
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(document)))


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return resolve_model(str(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")))


@pytest.fixture(scope="session")
def tokenizer_of(tiny_files: ModelFiles) -> dict[str, Tokenizer]:
    """By family."""
    return {
        "byte_level": Tokenizer.from_file(tiny_files.tokenizer),
        "gemma_like": _sentence_piece(strip=False),
        "llama2_like": _sentence_piece(strip=True),
    }


@pytest.fixture(scope="session")
def tiny(tokenizer_of: dict[str, Tokenizer]) -> Tokenizer:
    """A token is a byte; ids from 256 on are control tokens."""
    return tokenizer_of["byte_level"]


@pytest.fixture
async def text(tiny_files: ModelFiles) -> AsyncIterator[TextPipeline]:
    pipeline = TextPipeline.from_files(tiny_files, threads=2)
    yield pipeline
    pipeline.close()
