from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from common.errors import InvalidRequest
from common.model_files.resolve import resolve_model
from common.model_files.tokenizer import Tokenizer
from router.text import known_prefixes
from router.text.known_prefixes import PromptHeadCache, PromptTokenCache

from ...examples import examples

MARKS = ("<s>", "<e>", "<|longer|>")


def byte_level(**flags: Any) -> tokenizers.Tokenizer:
    """Bytes, with merges over spaces and letters, so that what stands side by side matters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("Ġ", "ab"), ("ab", "ab"), ("Ġ", "Ġ"), ("Ċ", "Ċ")]
    words = [*alphabet, *(left + right for left, right in merges)]
    inner = tokenizers.Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    inner.add_special_tokens([AddedToken(mark, normalized=False, special=True, **flags) for mark in MARKS])
    return inner


def metaspace(scheme: str) -> tokenizers.Tokenizer:
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("▁a", -1.0), ("a", -2.5), ("b", -3.0), ("ab", -1.5), ("▁ab", -1.2)]
    inner = tokenizers.Tokenizer(models.Unigram(pieces, 0, False))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    inner.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    return inner


def llama2() -> tokenizers.Tokenizer:
    inner = metaspace("never")
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return inner


KINDS = {
    "byte level": byte_level,
    "metaspace, first": lambda: metaspace("first"),
    "metaspace, always": lambda: metaspace("always"),
    "llama 2": llama2,
}


@pytest.fixture(autouse=True)
def short_texts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_prefixes, "MIN_BYTES", 0)
    monkeypatch.setattr(known_prefixes, "SEGMENT_BYTES", 4)


class Counting(Tokenizer):
    """Notes how many characters it was given."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        super().__init__(inner)
        self.num_chars = 0

    def encode(self, text: str, *, add_special_tokens: bool = True, alone: bool = False) -> list[int]:
        self.num_chars += len(text)
        return super().encode(text, add_special_tokens=add_special_tokens, alone=alone)


pieces = st.sampled_from([*MARKS, "a", "ab", " ", "  ", "\n", "b", "<", "s>", "|>", "é", "<s", ""])
texts = st.lists(st.lists(pieces, max_size=14).map("".join), min_size=1, max_size=6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(50), deadline=None)
@given(turns=texts, other=texts)
def test_tokens_are_those_of_the_whole_text(kind: str, turns: list[str], other: list[str]) -> None:
    tokenizer = Tokenizer(KINDS[kind]())
    known = PromptTokenCache(tokenizer, "".join(MARKS), max_bytes=6000)
    for talk in (turns, turns[:-1] + other, other, turns):
        for number in range(1, len(talk) + 1):
            text = "".join(talk[:number])
            assert known.encode(text) == tokenizer.encode(text, add_special_tokens=False)
            assert known.num_bytes <= 6000


def test_a_conversation_that_goes_on_costs_what_is_new() -> None:
    tokenizer = Counting(byte_level())
    known = PromptTokenCache(tokenizer, "".join(MARKS))
    text = ""
    for _ in range(50):
        text += "<s>user\n" + "ab a " * 20 + "<e>\n<s>assistant\n"
        before = tokenizer.num_chars
        known.encode(text)
        assert tokenizer.num_chars - before < 250
        text += " ab" * 20 + "<e>\n"
    assert len(text) > 8000


def test_prompts_of_another_salt_find_nothing() -> None:
    tokenizer = Counting(byte_level())
    known, text = PromptTokenCache(tokenizer, "".join(MARKS)), "<s>ab ab ab<e>" * 30 + "<s>b"
    first = known.encode(text, "a tenant")
    for salt, num_chars in (("another", len(text)), ("", len(text)), ("a tenant", 10)):
        tokenizer.num_chars = 0
        assert known.encode(text, salt) == first
        assert (tokenizer.num_chars == num_chars) if salt != "a tenant" else (tokenizer.num_chars <= num_chars)


def test_another_beginning_is_another_conversation() -> None:
    tokenizer = Counting(byte_level())
    known = PromptTokenCache(tokenizer, "".join(MARKS))
    rest = "<e>" + "ab" * 100 + "<e>"
    known.encode("<s>one" + rest)
    before = tokenizer.num_chars
    known.encode("<s>two" + rest)
    assert tokenizer.num_chars - before == len("<s>two" + rest)


@pytest.mark.parametrize("flags", [{"lstrip": True}, {"rstrip": True}, {"single_word": True}])
def test_tokens_that_look_around_them_cut_nothing(flags: dict[str, bool]) -> None:
    assert Tokenizer(byte_level(**flags)).cutting_tokens() == {}


def test_a_token_within_a_longer_one_cuts_nothing() -> None:
    inner = byte_level()
    inner.add_special_tokens([AddedToken("<e>\n", normalized=False, special=True)])
    inner.add_tokens([AddedToken("x<s>", normalized=False)])
    assert Tokenizer(inner).cutting_tokens().keys() == {"<|longer|>", "<e>\n"}


def test_a_tokenizer_that_cuts_or_fills_texts_is_left_alone() -> None:
    inner = byte_level()
    assert set(Tokenizer(inner).cutting_tokens()) == set(MARKS)
    inner.enable_truncation(5)
    assert Tokenizer(inner).cutting_tokens() == {}


def test_a_text_that_is_no_unicode_is_refused() -> None:
    known = PromptTokenCache(Tokenizer(byte_level()), "".join(MARKS))
    for text in ("<s>aaaa<e>\ud800", "<s>aaaa<e>ab", "<s>aaaa<e>\ud800"):
        if "\ud800" in text:
            with pytest.raises(InvalidRequest, match="surrogate"):
                known.encode(text)
        else:
            known.encode(text)


def test_the_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    files = resolve_model("tiny-random", weights=False)
    tokenizer = Tokenizer.from_file(files.tokenizer)
    marks = "".join(tokenizer.cutting_tokens())
    assert marks
    known, rng, text = PromptTokenCache(tokenizer, marks), random.Random(1), ""
    for _ in range(40):
        text += rng.choice([*tokenizer.cutting_tokens(), "word ", "é", "\n\n"]) * rng.randrange(1, 4)
        assert known.encode(text) == tokenizer.encode(text, add_special_tokens=False)
    assert known.num_bytes > 0


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(50), deadline=None)
@given(prompts=st.lists(texts.map("".join), min_size=1, max_size=3), heads=texts)
def test_tokens_behind_a_known_head_are_those_of_the_whole_text(
    kind: str, prompts: list[str], heads: list[str]
) -> None:
    tokenizer = Tokenizer(KINDS[kind]())
    known = PromptHeadCache(tokenizer, tokenizer.cutting_tokens())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known_prefixes, "MIN_HEAD_CHARS", 1)
        patch.setattr(known_prefixes, "MAX_HEADS", 4)
        for text in [head + prompt for _ in range(3) for head in heads for prompt in prompts]:
            assert known.encode(text) == tokenizer.encode(text, add_special_tokens=False)
            assert known.encode(text, alone=True) == known.encode(text)


def test_a_head_is_tokenised_twice_and_then_known_within_its_salt() -> None:
    tokenizer = Counting(byte_level())
    known, head = PromptHeadCache(tokenizer, tokenizer.cutting_tokens()), "<s>" + "ab " * 40 + "<e><s>"
    for number, salt in enumerate(("a", "a", "a", "b", "a")):
        before, text = tokenizer.num_chars, f"{head}user {number}<e><s>"
        known.encode(text, salt)
        is_known = number in (2, 4)
        assert tokenizer.num_chars - before == (len(text) - len(head) + len("<s>") if is_known else len(text))


def test_heads_that_come_once_are_forgotten() -> None:
    tokenizer = Tokenizer(byte_level())
    known = PromptHeadCache(tokenizer, tokenizer.cutting_tokens())
    for number in range(3 * known_prefixes.MAX_HEADS):
        known.encode(f"<s>user {number} {'ab' * 40}<e><s>")
    assert len(known._heads) == known_prefixes.MAX_HEADS


def test_what_is_no_unicode_behind_a_known_head_is_told_where_it_is() -> None:
    tokenizer = Tokenizer(byte_level())
    known, head = PromptHeadCache(tokenizer, tokenizer.cutting_tokens()), "<s>" + "ab " * 40 + "<e><s>"
    for _ in range(3):
        known.encode(head + "ab")
    with pytest.raises(InvalidRequest, match=f"at character {len(head)},"):
        known.encode(head + "\ud800")


@pytest.mark.slow
def test_threads_share_it() -> None:
    tokenizer = Tokenizer(byte_level())
    known = PromptTokenCache(tokenizer, "".join(MARKS), max_bytes=5000)
    wrong: list[str] = []

    def talk(seed: int) -> None:
        rng, text = random.Random(seed % 2), ""
        for _ in range(60):
            text += rng.choice(MARKS) + "ab a" * rng.randrange(8)
            if known.encode(text) != tokenizer.encode(text, add_special_tokens=False):
                wrong.append(text)

    threads = [threading.Thread(target=talk, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong and 0 < known.num_bytes <= 5000
