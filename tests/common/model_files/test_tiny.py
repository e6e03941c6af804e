from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.model_files.resolve import resolve_model
from common.model_files.tiny import BOS, EOS, IM_END, VOCAB_SIZE, make_tiny_model


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    names = ("a", "b", "c")
    a, b, c = (make_tiny_model(tmp_path / name, seed=int(name == "c")) / "model.safetensors" for name in names)
    assert a.read_bytes() == b.read_bytes()
    assert a.read_bytes() != c.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_greedy_text_is_varied_and_decided(tmp_path: Path, architecture: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    folder = make_tiny_model(tmp_path / "model", architecture=architecture)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for prompt in ("Hello", "def f(x):", "héllo 😀"):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        ran = model.generate(ids, max_new_tokens=64, do_sample=False, output_logits=True, return_dict_in_generate=True)
        new = ran.sequences[0, ids.shape[1] :].tolist()
        top = torch.stack(ran.logits).squeeze(1).topk(2).values  # [64, 2]
        assert len(new) == 64 and len(set(new)) > 20, tokenizer.decode(new)
        assert (top[:, 0] - top[:, 1]).median() > 0.3


@pytest.mark.parametrize("name", ["tiny-random", "tiny-random-gemma3"])
def test_it_resolves_by_name(cache: Path, name: str) -> None:
    files = resolve_model(name)
    assert files.model_id == name and files.vocab_size == VOCAB_SIZE and files.max_model_len == 4096
    assert files.eos_token_ids == (IM_END, EOS) and files.bos_token == "<|bos|>"
    assert files == resolve_model(name)
    assert BOS == 256
