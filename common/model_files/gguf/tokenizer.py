"""Converts the vocabulary of a GGUF file to a Hugging Face `tokenizer.json`, once, so that the router starts fast.

A GGUF file only names its pre-tokenizer, and an SPM (SentencePiece) vocabulary has scores instead of merges. Both are
reconstructed to match the original tokenizer:

- Byte-level BPE ("gpt2"): the split patterns are those of the models' `tokenizer.json` and of llama.cpp's
  `llm_tokenizer_bpe`. Unknown names are refused, because a wrong split silently costs quality.
- SPM ("llama"): merges are all splits of a piece into two pieces, ranked by score. User-defined pieces (Gemma's runs
  of spaces, tabs and newlines, its HTML tags) are matched whole before merging, longest first, as in SentencePiece.
  The `transformers` converter merges runs of spaces instead, and differs from SentencePiece beyond 31 of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from common.errors import ModelError
from common.model_files.gguf.vocabulary import CONTROL, NORMAL, USER_DEFINED, GGUFVocabulary, flag

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
SEED_SPLIT = QWEN2_SPLIT.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + CONTRACTION + "|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + CONTRACTION + "|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3_SPLITS = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# tokenizer.ggml.pre -> split pattern, or None for GPT-2's
GPT2_PRE = ("gpt-2", "gpt2", "olmo", "exaone4")
DIGITS_PRE = ("smollm", "starcoder", "refact", "command-r", "codeshell")
LLAMA3_PRE = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "smaug-bpe", "dbrx")
GLM4_PRE = ("glm4", "chatglm-bpe")
QWEN2_PRE = ("qwen2", "deepseek-r1-qwen", "megrez")
TEKKEN_PRE = ("tekken",)
SEED_PRE = ("seed-coder",)
O200K_PRE = ("gpt-4o", "minimax-m2")
DEEPSEEK3_PRE = ("deepseek-v3",)
PATTERNS = {
    LLAMA3_PRE: (LLAMA3_SPLIT,),
    GLM4_PRE: (LLAMA3_SPLIT,),
    QWEN2_PRE: (QWEN2_SPLIT,),
    SEED_PRE: (SEED_SPLIT,),
    TEKKEN_PRE: (TEKKEN_SPLIT,),
    O200K_PRE: (O200K_SPLIT,),
    DEEPSEEK3_PRE: DEEPSEEK3_SPLITS,
}
"""Patterns by name. Each pattern splits the results of the previous one."""


def convert_gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that `metadata` (of `read_gguf_head`) describe. Token ids are those of the file.

    Raises ModelError if the vocabulary is inconsistent or of an unsupported kind.
    """
    vocabulary = GGUFVocabulary.of(metadata)
    if vocabulary.kind == "llama":
        spaced = ["▁" * len(token) if set(token) == {" "} else token for token in vocabulary.tokens]
        vocabulary = replace(vocabulary, tokens=spaced)
    try:
        if vocabulary.kind == "gpt2":
            tokenizer = _byte_level(vocabulary)
        else:
            tokenizer = _sentencepiece(vocabulary, flag(metadata, "add_space_prefix", True))
        _add_tokens(tokenizer, vocabulary)
    except ModelError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"the GGUF vocabulary is not a valid tokenizer ({error}): convert it again") from error
    if (count := tokenizer.get_vocab_size(with_added_tokens=True)) != len(vocabulary.tokens):
        raise ModelError(
            f"the GGUF vocabulary has {len(vocabulary.tokens):,} tokens, of which {count:,} are distinct: "
            "convert the model again"
        )
    _add_processor(tokenizer, vocabulary, bos=_adds_bos(metadata), eos=flag(metadata, "add_eos_token", False))
    return tokenizer


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether plain text starts with BOS. Without the flag, follows llama.cpp's rule for the kind of vocabulary."""
    default = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in LLAMA3_PRE
    return flag(metadata, "add_bos_token", default)


def _byte_level(vocabulary: GGUFVocabulary) -> Tokenizer:
    pre = vocabulary.pre
    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    whole = pre in LLAMA3_PRE or pre in TEKKEN_PRE  # whole words are looked up before merging
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(vocabulary.merges), ignore_merges=whole))
    tokenizer.pre_tokenizer = _byte_level_split(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre in QWEN2_PRE:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _byte_level_split(pre: object) -> pre_tokenizers.PreTokenizer:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in GPT2_PRE:
        return gpt2
    if pre in DIGITS_PRE:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    for names, patterns in PATTERNS.items():
        if pre in names:
            splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
            return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    known = sorted({*GPT2_PRE, *DIGITS_PRE, *chain.from_iterable(PATTERNS)})
    raise ModelError(
        f"the GGUF file names the unknown pre-tokenizer {pre!r} (supported: {', '.join(known)}). "
        "Use the model's Hugging Face folder, which has a tokenizer.json"
    )


def _sentencepiece(vocabulary: GGUFVocabulary, prefix: bool) -> Tokenizer:
    tokens = vocabulary.tokens
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = tokens[vocabulary.ids.get("unknown", 0)]
    model = models.BPE(
        vocab=vocab, merges=_merges_by_score(vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    spaces: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return tokenizer


def _merges_by_score(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    """Return all splits of normal pieces into two others, best score first; ties go to the earlier token.

    Source: SentencePiece's bpe_model.cc, which merges the adjacent pair that forms the best-scored piece.
    """
    scores, normal = vocabulary.scores, [i for i, kind in enumerate(vocabulary.types) if kind == NORMAL]
    pieces = {vocabulary.tokens[i] for i in normal}
    merges: list[tuple[str, str]] = []
    for index in sorted(normal, key=lambda i: (-scores[i], i)):
        token = vocabulary.tokens[index]
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += [(left, right) for left, right in splits if left in pieces and right in pieces]
    return merges


def _add_tokens(tokenizer: Tokenizer, vocabulary: GGUFVocabulary) -> None:
    """Add control tokens (special) and user-defined ones (plain), which are matched whole in the text.

    Runs of spaces are matched after normalisation, which turns spaces into "▁"; all others in the raw text.
    """
    added = {CONTROL: tokenizer.add_special_tokens, USER_DEFINED: tokenizer.add_tokens}
    for kind, add in added.items():
        chosen = [token for token, own in zip(vocabulary.tokens, vocabulary.types, strict=True) if own == kind]
        add([AddedToken(token, special=kind == CONTROL, normalized=set(token) == {"▁"}) for token in chosen])


def _add_processor(tokenizer: Tokenizer, vocabulary: GGUFVocabulary, *, bos: bool, eos: bool) -> None:
    """Add a post-processor that adds BOS and EOS where the model wants them."""
    wanted, ids = {"bos": bos, "eos": eos}, vocabulary.ids
    special = {name: (vocabulary.tokens[ids[name]], ids[name]) for name, use in wanted.items() if use and name in ids}
    if special:
        template = [special["bos"][0]] if "bos" in special else []
        template += ["$A", *([special["eos"][0]] if "eos" in special else [])]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=sorted(set(special.values()))
        )
