"""Tiny random model in Hugging Face format, built in a fraction of a second for tests and `--model tiny-random`.

Weights are random but scaled: greedy text varies from step to step, mostly over printable ASCII with some other bytes
(for partial UTF-8). Top-1 margins are clear, and the text almost never reaches an end token.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from common.model_files.model_cache import write_atomically
from common.model_files.tokenizer import byte_alphabet

Array = npt.NDArray[np.float32]

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
BOS, EOS, _, IM_END, PAD = range(256, 261)
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
MAX_MODEL_LEN = 4096
"""Enough tokens for prompts of several chunks and many blocks."""
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 64, 4, 4, 2, 16, 160
"""Dimensions. A step takes well below a millisecond, and sizes that could be confused differ."""
SLIDING_WINDOW = 32
"""Two blocks, so that short tests exceed the window."""
LOGIT_STD = 3.0
"""Standard deviation of the logits. The margins of greedy tokens exceed rounding errors."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_model(folder: Path, *, seed: int = 0, architecture: Literal["llama", "gemma3"] = "llama") -> Path:
    """Write a loadable model (config, weights, tokenizer, chat template) into `folder`, create it, and return it.

    The same seed gives the same weights. Token ids 0 to 255 are bytes; 256 to 260 are `SPECIAL_TOKENS`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(_llama_weights(seed) if architecture == "llama" else _gemma3_weights(seed))
    write_atomically(folder / "model.safetensors", _safetensors(weights))
    documents = {
        "config.json": _llama_config() if architecture == "llama" else _gemma3_config(),
        "generation_config.json": {"bos_token_id": BOS, "eos_token_id": [EOS, IM_END], "pad_token_id": PAD},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": _tokenizer_config(),
    }
    for name, document in documents.items():
        write_atomically(folder / name, json.dumps(document, indent=1, ensure_ascii=False).encode())
    return folder


def _safetensors(weights: dict[str, Array]) -> bytes:
    """Return a file in the safetensors format: length of the header, header (JSON), tensor data."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in weights.items():
        head[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    encoded = json.dumps(head).encode()
    encoded += b" " * (-len(encoded) % 8)  # alignment of tensor data
    return struct.pack("<Q", len(encoded)) + encoded + b"".join(tensor.tobytes() for tensor in weights.values())


def _llama_config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        **_common_config(),
    }


def _gemma3_config() -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": HEAD_DIM,
        "sliding_window": SLIDING_WINDOW,
        "sliding_window_pattern": 2,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        **_common_config(),
    }


def _common_config() -> dict[str, Any]:
    return {
        "torch_dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_MODEL_LEN,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "bos_token_id": BOS,
        "eos_token_id": [EOS, IM_END],
        "pad_token_id": PAD,
    }


def _token_scale() -> Array:
    """Return the scale of each output row, [vocab, 1]: highest for printable ASCII, lowest for special tokens."""
    scale = np.full((VOCAB_SIZE, 1), 0.65, dtype=np.float32)
    scale[32:127] = 1.0
    scale[256:] = 0.1
    return scale


def _linear(rng: np.random.Generator, rows: int, columns: int, gain: float = 1.0) -> Array:
    """Return a matrix [rows, columns] that preserves unit variance, times `gain`."""
    return rng.standard_normal((rows, columns)).astype(np.float32) * np.float32(gain / columns**0.5)


def _layers(rng: np.random.Generator, out_gain: float) -> Iterator[tuple[str, Array]]:
    """Yield the projections of both architectures. Gain on q and k sharpens attention, so text depends on its past."""
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        yield f"{name}.self_attn.q_proj.weight", _linear(rng, HEADS * HEAD_DIM, HIDDEN, 2.0)
        yield f"{name}.self_attn.k_proj.weight", _linear(rng, KV_HEADS * HEAD_DIM, HIDDEN, 1.5)
        yield f"{name}.self_attn.v_proj.weight", _linear(rng, KV_HEADS * HEAD_DIM, HIDDEN, 1.5)
        yield f"{name}.self_attn.o_proj.weight", _linear(rng, HIDDEN, HEADS * HEAD_DIM, out_gain)
        yield f"{name}.mlp.gate_proj.weight", _linear(rng, FFN, HIDDEN, 1.5)
        yield f"{name}.mlp.up_proj.weight", _linear(rng, FFN, HIDDEN, 1.5)
        yield f"{name}.mlp.down_proj.weight", _linear(rng, HIDDEN, FFN, out_gain)


def _llama_weights(seed: int) -> Iterator[tuple[str, Array]]:
    rng = np.random.default_rng(seed)
    ones = np.ones(HIDDEN, dtype=np.float32)
    yield "model.embed_tokens.weight", rng.standard_normal((VOCAB_SIZE, HIDDEN)).astype(np.float32)
    yield from _layers(rng, 1.0)
    for layer in range(LAYERS):
        yield f"model.layers.{layer}.input_layernorm.weight", ones.copy()
        yield f"model.layers.{layer}.post_attention_layernorm.weight", ones.copy()
    yield "model.norm.weight", ones.copy()
    head = _linear(rng, VOCAB_SIZE, HIDDEN)
    length = np.linalg.norm(head, axis=1, keepdims=True)  # equal norms, otherwise a few long rows win every step
    yield "lm_head.weight", (head / length * _token_scale() * np.float32(LOGIT_STD)).astype(np.float32)


def _gemma3_weights(seed: int) -> Iterator[tuple[str, Array]]:
    """Yield the weights. Norm weights are offsets from one.

    Embeddings are tied, so they are small in the residual, otherwise each token would predict itself. The last norm
    scales the logits to `LOGIT_STD`.
    """
    rng = np.random.default_rng(seed)
    embedding_std = 0.03
    zeros = np.zeros(HIDDEN, dtype=np.float32)
    yield (
        "model.embed_tokens.weight",
        (rng.standard_normal((VOCAB_SIZE, HIDDEN)).astype(np.float32) * np.float32(embedding_std) * _token_scale()),
    )
    yield from _layers(rng, 1.0)
    for layer in range(LAYERS):
        for norm in ("input_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"):
            yield f"model.layers.{layer}.{norm}.weight", zeros.copy()
        # Attention adds less than the MLP, so that the newest token dominates.
        yield f"model.layers.{layer}.post_attention_layernorm.weight", zeros - np.float32(0.6)
        for norm in ("q_norm", "k_norm"):
            yield f"model.layers.{layer}.self_attn.{norm}.weight", zeros[:HEAD_DIM] + np.float32(0.5)
    final = LOGIT_STD / (embedding_std * HIDDEN**0.5) - 1
    yield "model.norm.weight", np.full(HIDDEN, final, dtype=np.float32)


def _tokenizer() -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = [
        {
            "id": 256 + i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, token in enumerate(SPECIAL_TOKENS)
    ]
    vocab = {char: byte for byte, char in enumerate(byte_alphabet())}
    vocab.update({token: 256 + i for i, token in enumerate(SPECIAL_TOKENS)})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_MODEL_LEN,
        "chat_template": CHAT_TEMPLATE,
    }
