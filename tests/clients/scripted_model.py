"""A model that says what is written here: real weights, a real tokenizer and a chat template, in Hugging Face's format.

Small random models call no tool, and small trained ones do so when it suits them. This one's next token depends on its
last token alone (attention and MLP add nothing; the output matrix is the table of what follows what), and the template
ends a prompt with a token that says where in the conversation it is. So real workers serve a model that thinks, calls
`get_weather` where the request has tools, answers once the result of the call is in the prompt, and edits a file. With
the template variable `opens_thought`, the prompt ends with the beginning of the thought.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from common.model_files.tiny import IM_END, SPECIAL_TOKENS, make_tiny_model

RESULT = "18 degrees"
"""What the tool returns."""
QUESTION = "What is the weather in Paris?"
THOUGHT, THOUGHT_AFTER = "The weather is asked for: a tool knows it.", "Now I know it."
ANSWER, GREETING, LOST = "It is 18 degrees in Paris.", "Good day to you!", "No result has come."

CALL = ("<tool_call>", '\n{"name": "get_weather",', ' "arguments":', ' {"city":', ' "Paris"', "}}", "\n</tool_call>")
SAID = ("It is ", "18 degrees", " in Paris.")
HELLO = ("Good day", " to you!")
FILE, CHANGED = "greeting.py", 'def greet() -> str:\n    return "Good day to you!"\n'
"""A user who names this file gets it back in a block of code, as the editor aider wants changes."""
EDIT = (f"{FILE}\n```python\n", "def greet() -> str:\n", '    return "Good day to you!"\n', "```\n")
SAYS = {
    "<|asked|>": ("<think>\n", "The weather is asked for:", " a tool knows it.", "\n</think>\n\n", *CALL),
    "<|asked-plain|>": CALL,
    "<|told|>": ("<think>\n\n", "Now I know it.", "\n</think>\n", *SAID),
    "<|told-plain|>": SAID,
    "<|greeted|>": ("<think>", "A greeting.", "\n</think>", *HELLO),
    "<|greeted-plain|>": HELLO,
    "<|edited|>": EDIT,
    "<|lost|>": ("No result", " has come."),
}
"""By the last token of a prompt: the tokens of the answer. No token has two successors."""


def _place(name: str) -> str:
    """Write the template's expression for the end of a prompt."""
    start = SAYS[f"<|{name}|>"][0]
    return f"{{{{ '<|{name}-plain|>' if plain else '<|{name}|>' ~ ({start!r} if opens_thought else '') }}}}"


TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
    "{% set plain = enable_thinking is defined and not enable_thinking %}{% set last = messages[-1] %}"
    "{% if last.role == 'tool' and '" + RESULT + "' not in last.content %}<|lost|>"
    "{% elif last.role == 'tool' %}" + _place("told") + "{% elif '" + FILE + "' in last.content %}<|edited|>"
    "{% elif tools %}" + _place("asked") + "{% else %}" + _place("greeted") + "{% endif %}{% endif %}"
)
HIDDEN, HEAD_DIM, NUM_HEADS, FFN = 320, 16, 4, 32
MAX_MODEL_LEN = 262_144
"""In tokens, which are bytes here: the instructions of coding agents have more than 100,000."""
CERTAIN = 2.0
"""A logit of 2 * sqrt(HIDDEN), about 36, for the token that follows, and 0 for most others."""
JSON_MARKS = b'"{}[],:'
"""Tokens with half of that logit: where a form excludes the token that follows, the model writes short JSON."""


def make_scripted_model(folder: Path) -> Path:
    """Writes the model into `folder`, which is created; returns it."""
    make_tiny_model(folder)
    pieces = sorted({piece for said in SAYS.values() for piece in said})
    first = 256 + len(SPECIAL_TOKENS)
    names = {text: first + i for i, text in enumerate([*SAYS, *pieces])}
    vocab_size = first + len(names)
    assert vocab_size <= HIDDEN
    _rewrite(folder / "tokenizer.json", lambda document: _add_tokens(document, names))
    _rewrite(folder / "tokenizer_config.json", lambda document: document.update(chat_template=TEMPLATE))
    _rewrite(folder / "config.json", lambda document: document.update(_sizes(vocab_size)))
    save_file(_weights(_successors(names), vocab_size), folder / "model.safetensors", {"format": "pt"})
    return folder


def _rewrite(path: Path, change: Any) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def _add_tokens(document: dict[str, Any], names: dict[str, int]) -> None:
    shape = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    document["added_tokens"] += [
        {"id": token, "content": text, "special": text in SAYS, **shape} for text, token in names.items()
    ]


def _successors(names: dict[str, int]) -> dict[int, int]:
    """What follows each token that an answer may have; the end follows all others."""
    found: dict[int, int] = {}
    for place, said in SAYS.items():
        chain = [names[place], *(names[piece] for piece in said), IM_END]
        for token, following in zip(chain, chain[1:], strict=False):
            assert found.setdefault(token, following) == following, f"two tokens follow one of {said}"
    return found


def _sizes(vocab_size: int) -> dict[str, int]:
    return {
        "vocab_size": vocab_size, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": 1,
        "num_attention_heads": NUM_HEADS, "num_key_value_heads": NUM_HEADS, "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_MODEL_LEN,
    }  # fmt: skip


def _weights(successors: dict[int, int], vocab_size: int) -> dict[str, torch.Tensor]:
    """Embeddings are unit vectors, which the only layer leaves as they are."""
    attention, layer = (NUM_HEADS * HEAD_DIM, HIDDEN), "model.layers.0"
    head = torch.zeros(vocab_size, HIDDEN)
    head[[*JSON_MARKS]] = CERTAIN / 2
    for token in range(vocab_size):
        head[successors.get(token, IM_END), token] = CERTAIN
    return {
        "model.embed_tokens.weight": torch.eye(vocab_size, HIDDEN),
        **{f"{layer}.self_attn.{name}_proj.weight": torch.zeros(attention) for name in "qkv"},
        f"{layer}.self_attn.o_proj.weight": torch.zeros(attention).T.contiguous(),
        **{f"{layer}.mlp.{name}_proj.weight": torch.zeros(FFN, HIDDEN) for name in ("gate", "up")},
        f"{layer}.mlp.down_proj.weight": torch.zeros(HIDDEN, FFN),
        f"{layer}.input_layernorm.weight": torch.ones(HIDDEN),
        f"{layer}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head,
    }
