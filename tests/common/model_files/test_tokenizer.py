from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from common.errors import InvalidRequest, ModelError
from common.model_files.files import ModelFiles
from common.model_files.resolve import resolve_model
from common.model_files.tokenizer import LONG_CHARS, LONG_TOKENS, Tokenizer

CORPUS = (
    "",
    " ",
    "\n",
    "Hello world",
    "  leading, trailing  ",
    "a b  c   d    e" + " " * 31 + "f",
    "\n\n\n\nfoo\n bar\t\tbaz \n\t x",
    "    def f(x):\n        return x**2  # ok\n\n\nclass A:\n\tpass\n",
    "1234567890 3.14159 1,000,000 v2.0.1 0xFF a1b2",
    "naïve café résumé Ünïcödé e\u0301 \u00e9 Å ﬁ ﬂ",
    "日本語のテキスト 中文字符 한국어 привет мир مرحبا بالعالم שלום ไทย",
    "😀😃👨‍👩‍👧‍👦🏳️‍🌈 🇫🇷 𝒳𝓎𝓏 𐍈 \U0001f9ff ᚠᛇᚻ ꧁꧂",
    "¿Qué? ¡Sí! «ok» “quotes” ‘x’ — – …",
    "I'm you're he'll WE'VE DON'T it's",
    "http://example.com/a?b=c&d=e#f user@host.org",
    "<table><tr><td>x</td></tr></table> <b>bold</b>",
    "\r\n\r\n windows\r\n \u00a0nbsp\u3000wide \u200b\u200d\ufeff",
    "\x00\x01\x7f control",
    '{"json": [1, 2, {"k": null}]} SELECT * FROM t WHERE a=\'b\' AND c>=10;',
    "∑∫√π≈≠ αβγ",
    "x" * 100 + "_" * 20 + "=" * 40 + "the the the supercalifragilisticexpialidocious",
    "Ġ Ċ literal <0x41> <0x0A>",
    "<bos>hi<eos> <unused5>",
    "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    "<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n<|endoftext|>",
)


SMOLLM2_DIGEST = "6c0f74e62f3ff00e35b68f926081fb68aae3c785dcb0fe17528a103a4d6c0016"
"""Of what transformers makes of the corpus."""


@pytest.fixture(scope="module")
def smollm2(smollm2_files: ModelFiles) -> Tokenizer:
    return Tokenizer.from_file(smollm2_files.tokenizer)


@pytest.fixture(scope="module")
def gemma3(gemma3_files: ModelFiles) -> Tokenizer:
    return Tokenizer.from_file(gemma3_files.tokenizer)


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(tiny_folder / "tokenizer.json")


def transformers_tokenizer(files: ModelFiles) -> Any:
    from transformers import AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoTokenizer.from_pretrained(files.weights[0].parent, gguf_file=files.weights[0].name)


def digest_of(ids: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def test_smollm2_encodes_as_transformers_did(smollm2: Tokenizer) -> None:
    """If it does not, the next test shows where; transformers takes seconds to read the vocabulary."""
    assert digest_of([smollm2.encode(text) for text in CORPUS]) == SMOLLM2_DIGEST


@pytest.mark.slow
def test_smollm2_encodes_as_transformers_does(smollm2: Tokenizer, smollm2_files: ModelFiles) -> None:
    oracle = transformers_tokenizer(smollm2_files)
    expected = [oracle.encode(text) for text in CORPUS]
    assert [smollm2.encode(text) for text in CORPUS] == expected
    assert digest_of(expected) == SMOLLM2_DIGEST


@pytest.mark.slow
@pytest.mark.timeout(600)  # transformers takes minutes to build this vocabulary on a slow machine
def test_gemma3_encodes_as_transformers_does(gemma3: Tokenizer, gemma3_files: ModelFiles) -> None:
    oracle = transformers_tokenizer(gemma3_files)
    assert [gemma3.encode(text) for text in CORPUS] == [oracle.encode(text) for text in CORPUS]
    assert gemma3.encode("x", add_special_tokens=False) == oracle.encode("x", add_special_tokens=False)


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize("name", ["smollm2", "tiny", pytest.param("gemma3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("text", CORPUS)
def test_decode_gives_the_text_back(name: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


# SmolLM2's tokenizer.json cuts digits off before it splits words, so spaces before a number stay together. The
# transformers conversion of the GGUF file leaves that step out and gives the first space a token of its own.
def test_smollm2_splits_digits_before_words(smollm2: Tokenizer) -> None:
    assert [smollm2.id_to_token(i) for i in smollm2.encode("b  33 4²")] == ["b", "ĠĠ", "3", "3", "Ġ", "4", "Â²"]


@pytest.mark.slow  # ids from SentencePiece itself, run over the pieces, scores and types of the same file.
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (" " * 32 + "x", [167, 1123]),
        (" " * 40, [167, 145]),
        (" " * 100 + "y", [167, 167, 167, 143, 236762]),
        ("▁under ▁▁x", [1208, 139, 236781]),
    ],
)
def test_gemma3_matches_runs_of_spaces_as_sentencepiece_does(gemma3: Tokenizer, text: str, ids: list[int]) -> None:
    assert gemma3.encode(text, add_special_tokens=False) == ids


@pytest.mark.slow
def test_gemma3_puts_bos_before_plain_text(gemma3: Tokenizer) -> None:
    assert gemma3.encode("Hi")[0] == 2 and gemma3.encode("Hi", add_special_tokens=False)[0] != 2


def test_special_tokens_stay_out_of_the_text(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("<|im_start|>hi<|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2 and smollm2.special_ids == frozenset(range(17))
    assert smollm2.decode(ids) == "hi"


@pytest.mark.parametrize("name", ["smollm2", "tiny", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_bytes_of_a_character_cut_in_two(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode("𐍈", add_special_tokens=False)
    assert len(ids) > 1
    assert b"".join(map(tokenizer.token_bytes, ids)) == "𐍈".encode()
    assert tokenizer.decode(ids[:1]) == "\ufffd"


def test_ids_without_a_token(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.token_bytes(49152) == b"" and smollm2.id_to_token(49152) == "" and smollm2.decode([49152]) == ""
    assert smollm2.token_to_id("<|im_end|>") == 2 and smollm2.token_to_id("no such token") is None


def test_every_token_has_bytes(smollm2: Tokenizer, tiny: Tokenizer) -> None:
    assert all(smollm2.token_bytes(i) for i in range(smollm2.vocab_size))
    assert [tiny.token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]


def test_a_lone_surrogate_is_refused(tiny: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate at character 2"):
        tiny.encode("ab\ud800")


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model"')
    with pytest.raises(ModelError, match="not a readable tokenizer"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


BYTE_FALLBACK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def byte_level() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    return made


def metaspace() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("▁a", -1.0), ("a", -2.0)], 0, False))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made


def byte_fallback() -> tokenizers.Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a"]
    made = tokenizers.Tokenizer(models.Unigram([(piece, -float(len(piece))) for piece in pieces], 0, True))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Sequence(BYTE_FALLBACK)
    return made


def word_pieces() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##a": 2}, unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    return made


@pytest.mark.parametrize(
    "make",
    [
        byte_level,
        metaspace,
        pytest.param(byte_fallback, marks=pytest.mark.slow),
        pytest.param(word_pieces, marks=pytest.mark.slow),
    ],
)
def test_a_long_text_is_encoded_and_decoded_as_the_library_does(make: Callable[[], tokenizers.Tokenizer]) -> None:
    inner = make()
    inner.add_special_tokens(["<|end|>"])
    tokenizer = Tokenizer(inner)
    text = "  aa a é 🧿<|end|> aaa   a" * (LONG_TOKENS // 8)
    assert len(text) > LONG_CHARS
    ids = inner.encode(text).ids
    assert tokenizer.encode(text) == ids
    ids = [*ids, *range(inner.get_vocab_size() + 1)] * 4  # bytes of a character apart, and an id without a token
    assert len(ids) > LONG_TOKENS
    for skip in (False, True):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == inner.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["smollm2", "tiny", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_long_text_of_a_model_is_encoded_and_decoded_as_the_library_does(
    name: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    inner, text = tokenizer._inner, "\n".join(CORPUS) * 20
    for special in (False, True):
        ids = tokenizer.encode(text, add_special_tokens=special)
        assert ids == inner.encode(text, add_special_tokens=special).ids and len(ids) > LONG_TOKENS
    for start in (0, 1, 2):
        assert tokenizer.decode(ids[start:]) == inner.decode(ids[start:])


@pytest.mark.parametrize("name", ["smollm2", "tiny"])
def test_a_text_has_the_same_tokens_where_no_other_thread_wants_the_lock(
    name: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    for text in ("", *CORPUS):
        for special in (False, True):
            assert tokenizer.encode(text, add_special_tokens=special, alone=True) == tokenizer.encode(
                text, add_special_tokens=special
            )


@contextmanager
def other_thread() -> Iterator[Callable[[], int]]:
    """How often another thread has run. From here on it does only when the GIL is free: nothing takes it away."""
    interval, turns, ends = sys.getswitchinterval(), [0], threading.Event()

    def turn() -> None:
        while not ends.is_set():
            turns[0] += 1
            time.sleep(0.0005)

    thread = threading.Thread(target=turn)
    thread.start()
    sys.setswitchinterval(1000)
    try:
        yield lambda: turns[0]
    finally:
        sys.setswitchinterval(interval)
        ends.set()
        thread.join()


def test_other_threads_run_while_a_long_text_is_encoded_or_decoded(smollm2: Tokenizer) -> None:
    text = "the quick brown fox jumps over the lazy dog " * 5000
    with other_thread() as num_turns:
        before = num_turns()
        ids = smollm2.encode(text)
        encoded = num_turns()
        for _ in range(100):
            smollm2.decode(ids)
            if num_turns() > encoded:
                break
        assert num_turns() > encoded > before


def test_a_text_is_tokenised_by_the_thread_that_asks(tiny: Tokenizer) -> None:
    before = len(list(Path("/proc/self/task").iterdir()))
    tiny.decode(tiny.encode("x" * 100_000))
    assert len(list(Path("/proc/self/task").iterdir())) <= before


@pytest.mark.parametrize("text", ["ab", "ab" * 3000], ids=["short", "long"])
def test_a_pair_is_joined_as_the_models_template_has_it(text: str) -> None:
    inner = tokenizers.Tokenizer.from_file(str(resolve_model("tiny-random").tokenizer))
    assert Tokenizer(inner).encode_pair(text, "c") == [*text.encode(), *b"c"]
    last = inner.id_to_token(258)
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"$A {last}", pair=f"$A {last} $B:1 {last}:1", special_tokens=[(last, 258)]
    )
    tokenizer = Tokenizer(inner)
    assert tokenizer.encode_pair(text, "c") == [*text.encode(), 258, *b"c", 258]
    for pair in ((text, "\ud800"), ("\ud800", text)):
        with pytest.raises(InvalidRequest, match="lone surrogate at character 0"):
            tokenizer.encode_pair(*pair)


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("add_special_tokens", [True, False])
@pytest.mark.parametrize(
    "pair", [("what is it?", "a long text " * 9), ("a long text " * 9, "it"), ("ab" * 20, "cd" * 20)]
)
def test_a_text_is_cut_as_transformers_cuts_it(
    pair: tuple[str, str], add_special_tokens: bool, side: Literal["left", "right"]
) -> None:
    """Special tokens stay where the model's template puts them, and of a pair the longer text is cut first."""
    from transformers import PreTrainedTokenizerFast

    inner = tokenizers.Tokenizer.from_file(str(resolve_model("tiny-random").tokenizer))
    first, last = (inner.id_to_token(token_id) for token_id in (257, 258))
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(first, 257), (last, 258)],
    )
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(inner.to_str()))
    theirs.truncation_side = side
    ours = Tokenizer(inner)
    for keep in (4, 5, 8, 17, 30, 31, 200):
        for texts in (pair, pair[:1]):
            expected = theirs(*texts, truncation=True, max_length=keep, add_special_tokens=add_special_tokens)
            second = texts[1] if len(texts) == 2 else None
            found = ours.encode_cut(texts[0], keep, second=second, side=side, add_special_tokens=add_special_tokens)
            assert found == expected["input_ids"], (keep, texts)


def test_what_a_file_cuts_and_pads_unasked_is_left_out(tmp_path: Path) -> None:
    """As transformers does: files of embedding models often have the settings of their last training in them."""
    original = resolve_model("tiny-random").tokenizer
    inner = tokenizers.Tokenizer.from_file(str(original))
    inner.enable_truncation(5)
    inner.enable_padding(length=16)
    inner.save(str(tmp_path / "tokenizer.json"))
    text = "more than five"
    assert Tokenizer.from_file(tmp_path / "tokenizer.json").encode(text) == Tokenizer.from_file(original).encode(text)
