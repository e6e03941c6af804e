from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from common.errors import ContextLengthExceeded, InvalidRequest, Unavailable
from common.model_files.files import ModelFiles
from common.model_files.tokenizer import Tokenizer
from router.text.calls.format import Function
from router.text.text_pipeline import TextPipeline
from router.text.text_threads import HUGE_TEXT, SHORT_TEXT, TINY_TEXT

USER = {"role": "user", "content": "Hi"}
PROMPT = "<|bos|><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


class Gate(Tokenizer):
    """A tokenizer whose long texts wait until the test lets them pass."""

    opened: threading.Event

    def encode(self, text: str, *, add_special_tokens: bool = True, alone: bool = False) -> list[int]:
        if len(text) > SHORT_TEXT:
            self.opened.wait()
        return super().encode(text, add_special_tokens=add_special_tokens, alone=alone)


@pytest.fixture
def gate(tiny_files: ModelFiles) -> Iterator[Gate]:
    gate = Gate.from_file(tiny_files.tokenizer)
    assert isinstance(gate, Gate)
    gate.opened = threading.Event()
    yield gate
    gate.opened.set()


async def test_text_to_tokens_and_back(text: TextPipeline) -> None:
    ids = await text.encode("Hé!")
    assert ids == list("Hé!".encode()) and await text.decode(ids) == "Hé!"


async def test_it_has_the_settings_of_the_model(text: TextPipeline, tiny_files: ModelFiles) -> None:
    assert (text.vocab_size, text.max_model_len) == (261, 4096)
    assert (text.eos_token, text.eos_token_ids) == (tiny_files.eos_token, tiny_files.eos_token_ids)
    assert text.chat_template == tiny_files.chat_template and text.model_id == tiny_files.model_id


async def test_a_conversation_is_rendered_by_the_template(text: TextPipeline) -> None:
    assert await text.encode_chat([USER]) == text.tokenizer.encode(PROMPT)


async def test_control_tokens_are_decoded_when_asked_for(text: TextPipeline) -> None:
    ids = text.tokenizer.encode(PROMPT)
    assert await text.decode(ids, skip_special_tokens=False) == PROMPT
    assert await text.decode(ids) == "user\nHi\nassistant\n"


async def test_a_text_that_must_be_too_long_is_refused_with_the_numbers(text: TextPipeline) -> None:
    with pytest.raises(ContextLengthExceeded, match="is 4096 tokens.*at least 83334 in the prompt"):
        await text.encode("x" * 1_000_000, limit=4096)
    with pytest.raises(ContextLengthExceeded) as raised:
        await text.encode_chat([{"role": "user", "content": "x" * 1_000_000}], limit=4096)
    assert (raised.value.status, raised.value.param) == (400, "messages")


async def test_a_text_that_may_fit_is_tokenised(text: TextPipeline) -> None:
    assert len(await text.encode("x" * 5000, limit=4096)) == 5000


async def test_a_lone_surrogate_is_refused(text: TextPipeline) -> None:
    for prompt in ("a\ud800", "\ud800" * 100_000):
        with pytest.raises(InvalidRequest):
            await text.encode(prompt, limit=10)


@pytest.mark.parametrize("token_id", [-1, 261, 2**70])
async def test_ids_outside_the_vocabulary_are_refused(text: TextPipeline, token_id: int) -> None:
    with pytest.raises(InvalidRequest, match="must be 0 to 260"):
        await text.decode([65, token_id])


async def test_text_whose_tokens_the_model_lacks_is_refused(tiny_files: ModelFiles) -> None:
    small = TextPipeline(Tokenizer.from_file(tiny_files.tokenizer), None, max_model_len=0, threads=1, vocab_size=258)
    with pytest.raises(InvalidRequest, match="Token id 258 is not in the vocabulary"):
        await small.encode("<|im_start|>")
    small.close()


async def test_a_base_model_has_no_chat(tiny_files: ModelFiles) -> None:
    base = TextPipeline(Tokenizer.from_file(tiny_files.tokenizer), None, max_model_len=0, threads=1, model_id="base")
    with pytest.raises(InvalidRequest, match="'base' has no chat template"):
        await base.encode_chat([USER])
    base.close()


async def test_short_texts_do_not_wait_for_long_ones(gate: Gate) -> None:
    pipeline = TextPipeline(gate, None, max_model_len=0, threads=2)
    long = asyncio.create_task(pipeline.encode("x" * (SHORT_TEXT + 1)))
    for size in (TINY_TEXT, TINY_TEXT + 1):
        assert len(await pipeline.encode("x" * size)) == size
    assert not long.done()
    gate.opened.set()
    assert len(await long) == SHORT_TEXT + 1
    pipeline.close()


async def test_huge_texts_keep_no_others_waiting(gate: Gate) -> None:
    pipeline = TextPipeline(gate, None, max_model_len=0, threads=2)
    opened = threading.Event()
    huge = asyncio.create_task(pipeline.apart(opened.wait, HUGE_TEXT + 1))
    gate.opened.set()
    for size in (SHORT_TEXT, SHORT_TEXT + 1, HUGE_TEXT):
        assert len(await pipeline.encode("x" * size)) == size
    assert not huge.done()
    opened.set()
    assert await huge
    pipeline.close()


LONG = "x" * SHORT_TEXT + "y"
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": LONG}}


@pytest.mark.parametrize(
    ("messages", "more"),
    [
        ([{**USER, "content": LONG}], {}),
        ([{**USER, "content": [{"type": "text", "text": LONG}]}], {}),
        ([USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}], {}),
        ([USER, {"role": "assistant", "content": "", "reasoning_content": LONG}], {}),
        ([{"role": "x" * 60, "content": ""}] * (SHORT_TEXT // 30), {}),
        ([USER], {"functions": [Function("f", LONG)]}),
        ([USER], {"functions": [Function("f", None, {"properties": {LONG: {}}})]}),
        ([USER], {"extra": {"documents": [{"text": [LONG]}]}}),
    ],
)
async def test_the_work_is_judged_by_all_texts_of_a_conversation(
    text: TextPipeline, monkeypatch: pytest.MonkeyPatch, messages: list[dict[str, Any]], more: dict[str, Any]
) -> None:
    threads: list[str] = []

    def render(*_: object, **__: object) -> str:
        threads.append(threading.current_thread().name)
        return "hi"

    monkeypatch.setattr("router.text.text_pipeline.chat_prompt", render)
    assert await text.encode_chat(messages, **more) == list(b"hi")
    assert threads[0].startswith("text-long"), "a thread of short texts, or the event loop"


async def test_pending_work_is_bounded(gate: Gate) -> None:
    pipeline = TextPipeline(gate, None, max_model_len=0, threads=1, max_pending=2)
    waiting = [asyncio.create_task(pipeline.encode("x" * (SHORT_TEXT + 1))) for _ in range(2)]
    await asyncio.sleep(0)
    assert pipeline.num_pending == 2
    with pytest.raises(Unavailable, match="queue is full: 2 of 2") as raised:
        await pipeline.encode("one more")
    assert raised.value.retry_after_s
    gate.opened.set()
    await asyncio.gather(*waiting)
    assert await pipeline.encode("ok") == list(b"ok")
    pipeline.close()


async def test_work_given_up_while_it_waits_frees_its_place(gate: Gate) -> None:
    pipeline = TextPipeline(gate, None, max_model_len=0, threads=1, max_pending=2)
    running, waiting = (asyncio.create_task(pipeline.encode("x" * (SHORT_TEXT + 1))) for _ in range(2))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert pipeline.num_pending == 1
    gate.opened.set()
    await running
    pipeline.close()


async def test_after_close_it_is_unavailable(text: TextPipeline) -> None:
    text.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await text.encode("x")


async def test_one_token_by_itself(text: TextPipeline) -> None:
    assert text.token_text(0xE2) == ("\ufffd", (0xE2,))
    assert text.token_text(257).token == "<|eos|>" and text.token_text(9999) == ("", ())
    assert text.token_text(257) is text.token_text(257)  # decoded once: an answer asks for twenty with each token
    assert [text.token_name(token_id) for token_id in (0xE2, 257, 9999)] == ["bytes:\\xe2", "<|eos|>", ""]


@pytest.mark.parametrize(
    ("prompt", "exceeds"),
    [
        ([1] * 10, False),
        ([1] * 11, True),
        ("", False),
        ("a" * 10, False),
        ("ab cd ef gh ij", True),
        ("ab cd ef gh ij " * 100_000, True),
        ("漢字" * 100, True),
    ],
)
def test_a_long_prompt_is_seen_by_its_beginning(text: TextPipeline, prompt: str | list[int], exceeds: bool) -> None:
    assert text.exceeds(prompt, 10) == exceeds


def test_a_prompt_of_no_more_tokens_never_exceeds(text: TextPipeline) -> None:
    """For every tokenizer the answer is a proof."""
    for prompt in ("a", "a b c", "aaaa bbbb", "é" * 20, " " * 50, "x" * 30 + " " + "y" * 30):
        num_tokens = len(text.tokenizer.encode(prompt))
        assert not text.exceeds(prompt, num_tokens)
        assert not text.exceeds(prompt, num_tokens + 1)


def test_a_long_beginning_is_not_tokenised(text: TextPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(text.tokenizer), "encode", lambda *_, **__: pytest.fail("on the event loop"))
    assert not text.exceeds("some words " * 5000, 20_000)
