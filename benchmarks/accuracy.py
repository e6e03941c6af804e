"""The accuracy that quantised weights and bfloat16 cost, against the same model in float32.

Measures the perplexity of a fixed text, and greedy agreement: at how many positions of the float32 model's greedy
answers to fixed prompts another variant, given the same tokens before, chooses the same next token.

A variant that ends in "+fp8-cache" or "+int8-cache" has a KV cache of 8-bit numbers. For one that ends in "+fp8-wire"
the KV of each prompt is converted to 8-bit numbers and back before the answer is computed; in the text of the
perplexity that happens after every 128 tokens.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from rich.progress import Progress
from torch import Tensor

from benchmarks.load.report import open_console, print_table
from benchmarks.script import run, script_parser, write_result
from common.engine.kv.cache import KVCache
from common.engine.models.batch import SequenceChunk
from common.engine.models.load import load_model
from common.engine.run.runner import ModelRunner
from common.model_files.files import ModelFiles
from common.model_files.resolve import resolve_model
from common.model_files.tokenizer import Tokenizer
from kernels import gather_blocks, scatter_blocks

PROGRAM: Final = "python -m benchmarks.accuracy"
PASSAGE: Final = Path(__file__).with_name("data") / "passage.txt"
VARIANTS: Final = (
    *("float32", "bfloat16", "bfloat16+int8", "bfloat16+auto", "bfloat16+int4"),
    *("bfloat16+fp8-wire", "bfloat16+fp8-cache", "bfloat16+int8-cache", "bfloat16+auto+int8-cache"),
)
FP8_WIRE: Final = "+fp8-wire"
CACHES: Final = ("fp8", "int8")
BLOCK_SIZE: Final = 64
ROWS_AT_ONCE: Final = 2 * BLOCK_SIZE
PROMPTS: Final = (
    "The three most important inventions of the nineteenth century were",
    "To bake a loaf of bread you need",
    "def is_prime(n):\n    ",
    "Dear Sir or Madam, I am writing to",
    "The capital of Australia is not Sydney but",
    "Once upon a time, in a village by the sea, there lived",
    "The difference between weather and climate is",
    "1, 1, 2, 3, 5, 8, 13,",
    "In computer networks, a router is a device that",
    "My grandmother always said that",
    "The human heart pumps",
    "A poem about autumn:\n",
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A dtype, the quantization of the weights, whether a prompt's KV came in 8 bits, and the cache's type."""

    dtype: str
    quantization: str
    fp8_wire: bool = False
    kv_dtype: str = ""

    @classmethod
    def parse(cls, name: str) -> Variant:
        cached = next((kind for kind in CACHES if name.endswith(f"+{kind}-cache")), "")
        rest = name.removesuffix(f"+{cached}-cache").removesuffix(FP8_WIRE)
        dtype, _, quantization = rest.partition("+")
        return cls(dtype, quantization or "none", name.endswith(FP8_WIRE), cached)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """One variant against float32: agreement 0 .. 1; divergence in nats, the mean of KL(float32 || variant)."""

    name: str
    perplexity: float
    agreement: float
    divergence: float


class Model:
    """One variant, which computes one sequence at a time."""

    def __init__(self, files: ModelFiles, variant: Variant, max_len: int) -> None:
        decoder = load_model(files, dtype=variant.dtype, quantization=variant.quantization)
        num_blocks = -(-max_len // BLOCK_SIZE)
        self._table = tuple(range(num_blocks))
        self._kv = KVCache(decoder.config, num_blocks, BLOCK_SIZE, variant.kv_dtype or variant.dtype)
        self._fp8_wire = variant.fp8_wire
        self._runner = ModelRunner(decoder, self._kv)

    def logits(self, token_ids: Sequence[int], num_prompt: int = 0) -> Tensor:
        """Logits after every token, float32 [T, vocab]. Each token is a chunk of its own, many of them in a step.

        The KV of the first `num_prompt` tokens, a prompt, comes over the wire.
        """
        num_shipped = num_prompt if self._fp8_wire else 0
        parts = []
        for rows in (*pieces(0, num_shipped), *pieces(num_shipped, len(token_ids))):
            parts.append(self._runner.forward([SequenceChunk((token_ids[i],), i, self._table) for i in rows]))
            if rows.start < num_shipped:
                self._ship(rows)
        return torch.cat(parts)

    def _ship(self, rows: range) -> None:
        """Convert the KV of these positions, which begin with a block, to the wire's 8-bit numbers and back."""
        end = -(-rows.stop // BLOCK_SIZE)
        self._kv.clear_slots(end - 1, rows.stop - (end - 1) * BLOCK_SIZE)
        ids = torch.arange(rows.start // BLOCK_SIZE, end)
        scatter_blocks(gather_blocks(self._kv.tensor, ids, quantised=True), self._kv.tensor, ids, quantised=True)

    def continue_greedily(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The tokens and `count` greedy ones behind them."""
        logits, out = self.logits(token_ids), list(token_ids)
        for _ in range(count):
            out.append(int(logits[-1].argmax()))
            logits = self._runner.forward([SequenceChunk((out[-1],), len(out) - 1, self._table)])
        return out


def pieces(first: int, end: int) -> list[range]:
    """The positions of each step."""
    return [range(at, min(at + ROWS_AT_ONCE, end)) for at in range(first, end, ROWS_AT_ONCE)]


def logprobs_of(logits: Tensor, token_ids: Sequence[int]) -> Tensor:
    """The log-likelihood of every token but the first: float64 [T - 1] of logits [T, vocab]."""
    logprobs = torch.log_softmax(logits[:-1].double(), -1)
    return logprobs.gather(1, torch.tensor(token_ids[1:]).unsqueeze(1)).squeeze(1)


def perplexity(logprobs: Tensor) -> float:
    """exp of the mean negative log-likelihood."""
    return math.exp(-float(logprobs.mean()))


def compare(reference: Tensor, logits: Tensor) -> tuple[int, float]:
    """The number of positions with the same greedy token, and the summed divergence."""
    same = int((reference.argmax(-1) == logits.argmax(-1)).sum())
    expected, found = torch.log_softmax(reference, -1), torch.log_softmax(logits, -1)
    return same, float((expected.exp() * (expected - found)).sum())


@dataclass(frozen=True, slots=True)
class Measured:
    """A model to measure: the reference's files, or others with the same tokenizer."""

    name: str
    files: ModelFiles
    variant: Variant


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt with a greedy answer behind it, and the logits [T, vocab] that chose each of its tokens."""

    token_ids: list[int]
    num_prompt: int
    expected: Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """One model on a reference: log-likelihoods of the passage [T - 1], agreement and divergence as in Accuracy."""

    logprobs: Tensor
    agreement: float
    divergence: float


@dataclass(frozen=True, slots=True)
class Reference:
    """The sequences that models are measured on: the passage, and the answers of a model in float32."""

    passage: list[int]
    answers: list[Answer]

    @classmethod
    def of(cls, files: ModelFiles, count: int) -> Reference:
        """Generate answers of `count` tokens with `files` in float32."""
        tokenizer = Tokenizer.from_file(files.tokenizer)
        passage = tokenizer.encode(PASSAGE.read_text("utf-8"))
        prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
        oracle = Model(files, Variant("float32", "none"), max(map(len, prompts)) + count)
        answers = []
        for prompt in prompts:
            token_ids = oracle.continue_greedily(prompt, count)
            answers.append(Answer(token_ids, len(prompt), oracle.logits(token_ids)[len(prompt) - 1 : -1]))
        return cls(passage, answers)

    @property
    def sequences(self) -> list[list[int]]:
        """Every sequence that a model reads to be scored."""
        return [*(answer.token_ids for answer in self.answers), self.passage]

    def score(self, one: Measured, read: Callable[[int], None] = lambda count: None) -> Scores:
        """Score a model; `read` hears of every sequence's tokens."""
        model = Model(one.files, one.variant, max(map(len, self.sequences)))
        same, divergence, total = 0, 0.0, 0
        for answer in self.answers:
            logits = model.logits(answer.token_ids, answer.num_prompt)[answer.num_prompt - 1 : -1]
            agreed, diverged = compare(answer.expected, logits)
            same, divergence, total = same + agreed, divergence + diverged, total + len(logits)
            read(len(answer.token_ids))
        text = logprobs_of(model.logits(self.passage, len(self.passage)), self.passage)
        read(len(self.passage))
        return Scores(text, same / total, divergence / total)


def parse(argv: Sequence[str]) -> Namespace:
    parser = script_parser(PROGRAM, __doc__, model="built-in name, folder or GGUF file")
    parser.add_argument(
        "--variants",
        default=",".join(VARIANTS),
        help="variants, separated by commas: a dtype with +quantization, +fp8-wire, +fp8-cache or +int8-cache",
    )
    parser.add_argument("--tokens", type=int, default=96, help="tokens per greedy answer")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options, console = parse(argv), open_console()
    files, names = resolve_model(options.model), options.variants.split(",")
    with Progress(console=console, transient=True) as progress, torch.inference_mode():
        task, reference = progress.add_task("variants", total=len(names)), Reference.of(files, options.tokens)
        results = []
        for name in names:
            scores = reference.score(Measured(name, files, Variant.parse(name)))
            results.append(Accuracy(name, perplexity(scores.logprobs), scores.agreement, scores.divergence))
            progress.advance(task)
    title = f"{files.model_id}: accuracy against float32, {len(PROMPTS)} answers of {options.tokens} tokens"
    columns = ("variant", "perplexity", "greedy agreement", "KL divergence, nats")
    rows = [(row.name, f"{row.perplexity:.3f}", f"{row.agreement:.2%}", f"{row.divergence:.5f}") for row in results]
    print_table(console, title, columns, rows)
    write_result(options, PROGRAM, argv, {"results": [asdict(row) for row in results]}, model=files.model_id)
    return 0


if __name__ == "__main__":
    run(main)
