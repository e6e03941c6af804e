"""How the tests of models run them: through the paged runner in every shape, and through transformers."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.engine.kv.cache import KVCache
from common.engine.models.batch import SequenceChunk
from common.engine.models.decoder import Decoder
from common.engine.models.load import load_model
from common.engine.run.runner import ModelRunner
from common.model_files.files import ModelFiles
from kernels import KVScales


def files_of(folder: Path) -> ModelFiles:
    """A transformers folder, without its tokenizer."""
    weights = tuple(sorted(folder.glob("*.safetensors")))
    return ModelFiles(
        model_id=folder.name,
        format="hf",
        weights=weights,
        tokenizer=folder / "tokenizer.json",
        config=folder / "config.json",
        eos_token_ids=(),
        max_model_len=0,
        vocab_size=0,
        weights_hash="",
    )


def load(folder: Path, dtype: str = "float32") -> Decoder:
    return load_model(files_of(folder), dtype=dtype)


SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}


def random_checkpoint(folder: Path, family: str, **options: Any) -> Path:
    """A model of random weights, wide enough that the tokens vary, saved by transformers itself."""
    import transformers

    torch.manual_seed(11)
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        spread = 0.3 if "norm" in name or "bias" in name or "sinks" in name else 0.15
        one = "norm" in name and not family.startswith("Gemma")
        parameter.data = torch.randn(parameter.shape) * spread + (1.0 if one else 0.0)
    for name, buffer in model.named_buffers():
        if "correction" in name:
            buffer.copy_(torch.randn(buffer.shape) * 0.3)
    model.save_pretrained(folder)
    return folder


def prompt(count: int, vocab_size: int = 250, seed: int = 1) -> list[int]:
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Pool:
    """A runner, and block tables drawn in random order from its cache."""

    def __init__(
        self,
        model: Decoder,
        *,
        num_blocks: int = 96,
        block_size: int = 16,
        kv_dtype: torch.dtype | None = None,
        kv_scales: Sequence[KVScales] = (),
    ) -> None:
        self.kv = KVCache(model.config, num_blocks, block_size, kv_dtype or model.dtype, scales=kv_scales)
        self.kv.tensor.fill_(
            -1 if self.kv.dtype == torch.int8 else float("nan")
        )  # nothing may be read that was not written
        self.runner = ModelRunner(model, self.kv)
        self.free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()

    def table(self, num_tokens: int) -> list[int]:
        """One block longer than needed."""
        return [self.free.pop() for _ in range(num_tokens // self.kv.block_size + 2)]

    def greedy(self, token_ids: Sequence[int], count: int, *, chunk: int = 512, table: Sequence[int] = ()) -> list[int]:
        """`count` tokens after the prompt, which is run in chunks."""
        tokens, done = list(token_ids), 0
        table = table or self.table(len(tokens) + count)
        while True:
            part = tokens[done : done + chunk]
            last = done + len(part) == len(tokens)
            logits = self.runner.forward([SequenceChunk(part, done, table, last)])
            done += len(part)
            if last:
                tokens.append(int(logits[0].argmax()))
                if len(tokens) == len(token_ids) + count:
                    return tokens[len(token_ids) :]

    def greedy_batch(self, prompts: Sequence[Sequence[int]], count: int, *, chunk: int) -> list[list[int]]:
        """All prompts at once, joining one step after another: decode rows and prefill chunks mix in a step."""
        tokens, done = [list(p) for p in prompts], [0] * len(prompts)
        tables = [self.table(len(p) + count) for p in prompts]
        goal = [len(p) + count for p in prompts]
        step = 0
        while any(len(have) < want for have, want in zip(tokens, goal, strict=True)):
            step += 1
            running = [i for i in range(min(step, len(prompts))) if len(tokens[i]) < goal[i]]
            parts = [tokens[i][done[i] : done[i] + chunk] for i in running]
            chunks = [
                SequenceChunk(part, done[i], tables[i], done[i] + len(part) == len(tokens[i]))
                for i, part in zip(running, parts, strict=True)
            ]
            rows = iter(self.runner.forward(chunks).argmax(-1).tolist())
            for i, one in zip(running, chunks, strict=True):
                done[i] += len(one.token_ids)
                if one.sample:
                    tokens[i].append(next(rows))
        return [have[len(p) :] for have, p in zip(tokens, prompts, strict=True)]


def transformers_model(folder: Path, gguf: str | None = None) -> Any:
    import transformers

    kind: Any = transformers.AutoModelForCausalLM
    if gguf is None:  # which does not know models that come within one that also sees
        (name,) = json.loads((folder / "config.json").read_text()).get("architectures", ["AutoModelForCausalLM"])
        kind = getattr(transformers, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def transformers_greedy(model: Any, token_ids: Sequence[int], count: int) -> tuple[list[int], Tensor]:
    """`count` tokens, and the logits [count, vocab_size] that they were taken from."""
    # transformers 5.24 renamed it, and warns of the old name.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    step, past, tokens, logits = torch.tensor([token_ids]), None, list[int](), []
    for _ in range(count):
        output = model(step, use_cache=True, **{name: past})
        past = getattr(output, name)
        logits.append(output.logits[0, -1].float())
        tokens.append(int(logits[-1].argmax()))
        step = torch.tensor([tokens[-1:]])
    return tokens, torch.stack(logits)


def logits_along(pool: Pool, token_ids: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Logits [len(tokens), vocab_size] before each of `tokens`, of the paged runner."""
    table, everything = pool.table(len(token_ids) + len(tokens)), [*token_ids, *tokens]
    rows = [pool.runner.forward([SequenceChunk(token_ids, 0, table)])]
    for done in range(len(token_ids), len(everything) - 1):
        rows.append(pool.runner.forward([SequenceChunk([everything[done]], done, table)]))
    return torch.cat(rows)
