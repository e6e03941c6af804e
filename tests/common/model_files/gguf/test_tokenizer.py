from __future__ import annotations

from typing import Any

import pytest

from common.errors import ModelError
from common.model_files.describe import gguf_end_tokens
from common.model_files.gguf.tokenizer import convert_gguf_tokenizer
from common.model_files.gguf.vocabulary import GGUFVocabulary
from common.model_files.tokenizer import Tokenizer, byte_alphabet

ALPHABET = byte_alphabet()


def bpe(pre: str, **extra: Any) -> dict[str, Any]:
    """The metadata of a byte-level vocabulary that merges pairs of digits, spaces and letters."""
    tokens = [*ALPHABET, "12", "ab", "Ġa", "ĠĠ", "<|end|>", "<think>", "123", "e\u0301"]
    merges = ["1 2", "a b", "Ġ a", "Ġ Ġ"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 260 + [3, 4, 1, 1],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 260,
        "tokenizer.ggml.eos_token_id": 260,
        **{f"tokenizer.ggml.{name}": value for name, value in extra.items()},
    }


def spm(**extra: Any) -> dict[str, Any]:
    """The metadata of a SentencePiece vocabulary in which "abc" is best cut as "a bc", by score."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "c", "bc", "ab", "▁a", "  "]
    types = [2, 3, 3] + [6] * 256 + [1] * 7 + [4]
    scores = [0.0] * 259 + [-7.0, -6.0, -5.0, -4.0, -1.0, -2.0, -3.0, -1000.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{name}": value for name, value in extra.items()},
    }


def pieces(metadata: dict[str, Any], text: str) -> list[str]:
    return list(convert_gguf_tokenizer(metadata).encode(text).tokens)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["12", "3", "Ġ", "Ġa"]),  # a number is one word
        ("smollm", ["1", "2", "3", "Ġ", "Ġa"]),
        ("qwen2", ["1", "2", "3", "Ġ", "Ġa"]),
        ("tekken", ["1", "2", "3", "Ġ", "Ġa"]),
        ("gpt-4o", ["12", "3", "Ġ", "Ġa"]),
        ("glm4", ["12", "3", "Ġ", "Ġa"]),  # merged, and no BOS
        ("seed-coder", ["1", "2", "3", "Ġ", "Ġa"]),
        ("exaone4", ["12", "3", "Ġ", "Ġa"]),
        ("llama-bpe", ["<|end|>", "123", "Ġ", "Ġa"]),  # looked up whole; BOS unless the file says no
    ],
)
def test_each_pre_tokenizer_cuts_numbers_its_own_way(pre: str, expected: list[str]) -> None:
    assert pieces(bpe(pre), "123  a") == expected


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("llama-bpe", ["Don", "'t", "ĠStop", "/", "123", "45", "Ġ", "ĠHTMLPage"]),
        ("tekken", ["Don", "'t", "ĠStop", "/", "1", "2", "3", "4", "5", "Ġ", "ĠHTMLPage"]),
        ("gpt-4o", ["Don't", "ĠStop", "/", "123", "45", "Ġ", "ĠHTMLPage"]),
        ("deepseek-v3", ["Don", "'t", "ĠStop", "/", "123", "45", "Ġ", "ĠHTMLPage"]),
    ],
)
def test_words_are_split_as_the_model_was_trained(pre: str, words: list[str]) -> None:
    split = convert_gguf_tokenizer(bpe(pre)).pre_tokenizer.pre_tokenize_str("Don't Stop/12345  HTMLPage")
    assert [word for word, _ in split] == words


@pytest.mark.parametrize(("pre", "words"), [("qwen2", ["!Ċ", "a"]), ("seed-coder", ["!", "Ċ", "a"])])
def test_a_line_break_belongs_to_the_sign_before_it_or_not(pre: str, words: list[str]) -> None:
    split = convert_gguf_tokenizer(bpe(pre)).pre_tokenizer.pre_tokenize_str("!\na")
    assert [word for word, _ in split] == words


def test_control_and_user_defined_tokens_are_matched_whole() -> None:
    converted = convert_gguf_tokenizer(bpe("gpt-2"))
    assert converted.encode("ab<|end|><think>ab").ids == [257, 260, 261, 257]
    assert Tokenizer(converted).special_ids == {260}
    assert Tokenizer(converted).decode([257, 260, 261]) == "ab<think>"


@pytest.mark.parametrize(
    ("control", "ends"),
    [(["<|end|>", "<|x|>"], [9, 0]), (["<|end|>", "<|return|>", "<|call|>"], [9, 1, 2]), (["<|return|>"], [9])],
)
def test_what_ends_an_answer(control: list[str], ends: list[int]) -> None:
    """In gpt-oss's vocabulary <|end|> ends a message of several."""
    tokens = [*control, *"abcdefgh"]
    types = [3] * len(control) + [1] * 8
    vocabulary = GGUFVocabulary("gpt2", None, tokens, types, (), (), {"eos": 9})
    assert list(gguf_end_tokens(vocabulary)) == ends


def test_bos_and_eos_are_added_where_the_file_says_so() -> None:
    assert pieces(bpe("gpt-2", add_bos_token=True, add_eos_token=True), "ab") == ["<|end|>", "ab", "<|end|>"]
    assert pieces(bpe("llama-bpe", add_bos_token=False), "ab") == ["ab"]


@pytest.mark.parametrize("token_id", [-1, 0xFFFF_FFFF])
def test_an_id_of_minus_one_names_no_token(token_id: int) -> None:
    metadata = bpe("gpt-2", add_bos_token=True, bos_token_id=token_id, eos_token_id=token_id)
    assert pieces(metadata, "ab") == ["ab"]
    assert GGUFVocabulary.of(metadata).ids == {}


def test_merges_follow_the_scores() -> None:
    assert pieces(spm(add_space_prefix=False), "abc") == ["<s>", "a", "bc"]
    assert pieces(spm(add_space_prefix=False, add_bos_token=False), "ab") == ["ab"]


def test_the_prefix_space_comes_and_goes() -> None:
    tokenizer = Tokenizer(convert_gguf_tokenizer(spm()))
    ids = tokenizer.encode("ac é")
    assert [tokenizer.id_to_token(i) for i in ids] == ["<s>", "▁a", "c", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "ac é"
    assert [tokenizer.token_bytes(i) for i in ids[1:]] == [b" a", b"c", b" ", b"\xc3", b"\xa9"]


def test_runs_of_spaces_are_user_defined_pieces() -> None:
    assert pieces(spm(add_space_prefix=False), "a   b") == ["<s>", "a", "▁▁", "▁", "b"]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "has no vocabulary"),
        (bpe("gpt-2") | {"tokenizer.ggml.model": "bert"}, "of kind 'bert'"),
        (bpe("my-own"), "pre-tokenizer 'my-own'"),
        (bpe("gpt-2") | {"tokenizer.ggml.merges": []}, "without merges"),
        (spm() | {"tokenizer.ggml.scores": []}, "without scores and types"),
        (spm() | {"tokenizer.ggml.scores": [0.0]}, "scores is a list of 1, expected one for each of 267 tokens"),
        (
            bpe("gpt-2", tokens=[*ALPHABET, "12", "ab", "Ġa", "ĠĠ", "<|end|>", "<think>", "!", "!"]),
            "'!' as tokens 33 and 263, expected distinct tokens",
        ),
        (bpe("gpt-2", token_type=[1]), "token_type is a list of 1, expected one for each of 264 tokens"),
        (bpe("gpt-2", bos_token_id=264), "bos_token_id is 264, expected the id of one of 264 tokens"),
        (bpe("gpt-2", bos_token_id="<s>"), "bos_token_id is '<s>', expected the id of one"),
        (bpe("gpt-2", merges=["1 2", "ab"]), "merges.1. is 'ab', expected two tokens that make a third"),
        (bpe("gpt-2", merges=["1 3"]), "merges.0. is '1 3', expected two tokens that make a third"),
        (bpe("gpt-2", add_bos_token="yes"), "add_bos_token is 'yes', expected true or false"),
        (bpe("gpt-2", tokens="abc"), "tokens is 'abc', expected a list of str"),
    ],
)
def test_what_cannot_be_converted_is_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        convert_gguf_tokenizer(metadata)
