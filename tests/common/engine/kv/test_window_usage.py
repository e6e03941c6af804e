"""KV that is kept and never read again, for models whose numbers are known."""

from __future__ import annotations

import pytest

from common.engine.kv.window_usage import in_words, kv_usage

GEMMA_3_270M = tuple(0 if (layer + 1) % 6 == 0 else 512 for layer in range(18))
GPT_OSS_20B = (128, 0) * 12
MISTRAL_7B = (4096,) * 32


@pytest.mark.parametrize(
    ("windows", "length", "kept", "read"),
    [
        (GEMMA_3_270M, 8192, 18 * 512, 3 * 512 + 15 * 33),
        (GEMMA_3_270M, 32768, 18 * 2048, 3 * 2048 + 15 * 33),
        (GPT_OSS_20B, 8192, 24 * 512, 12 * 512 + 12 * 9),
        (GPT_OSS_20B, 32768, 24 * 2048, 12 * 2048 + 12 * 9),
        (MISTRAL_7B, 32768, 32 * 257, 32 * 257),
        (MISTRAL_7B, 100, 32 * 7, 32 * 7),
        ((0,) * 4, 32768, 4 * 2048, 4 * 2048),
    ],
)
def test_blocks_that_are_kept_and_those_that_are_read(
    windows: tuple[int, ...], length: int, kept: int, read: int
) -> None:
    found = kv_usage(windows, 16, length)
    assert (found.num_kept, found.num_read) == (kept, read)


def test_what_docs_models_says() -> None:
    shares = [
        f"{kv_usage(windows, 16, length).unread_share:.0%}"
        for windows in (GEMMA_3_270M, GPT_OSS_20B)
        for length in (8192, 32768)
    ]
    assert shares == ["78%", "82%", "49%", "50%"]


def test_the_words_of_the_log() -> None:
    assert in_words((0, 0), 16, 4096) == in_words((8192, 8192), 16, 4096) == ""
    assert "all layers have attention windows of at most 4096 tokens: a sequence uses at most 257 blocks" in in_words(
        MISTRAL_7B, 16, 32768
    )
    said = in_words(GEMMA_3_270M, 16, 32768)
    assert (
        said.startswith("15 of 18 layers have attention windows of at most 512 tokens")
        and "82% at 32,768 tokens" in said
    )
    assert "at 2,048 tokens" in in_words(GEMMA_3_270M, 16, 2048)
