"""The time in which a CPU samples a step's tokens, beside plain torch and the floor.

The floor is one read of the logits. Plain torch samples where there is no compiler, with one sort of a row for top_k or
top_p. Logits are random: without a model's few likely tokens, they are the harder case.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import torch

from benchmarks.load.report import open_console, print_table
from benchmarks.script import run, script_parser, seconds_of, write_result
from common.grammar.grammars import Grammars
from common.model_files.resolve import resolve_model
from common.sampling.sampler import Sampler, SamplingRow
from common.wire.sampling_params import SamplingParams
from kernels import Draw, SamplingTensors
from kernels.cpu.backend import native_backend
from kernels.cpu.large_pages import Arena
from kernels.plain.sampling import sample_by_sorting

PROGRAM: Final = "python -m benchmarks.sampling"
ANY_JSON: Final = 'start: %json {"type": "object"}'
KINDS: Final[dict[str, dict[str, float | str]]] = {
    "greedy": {"temperature": 0.0},
    "greedy, JSON": {"temperature": 0.0, "grammar": ANY_JSON},
    "temperature": {"temperature": 0.8},
    "temperature, JSON": {"temperature": 0.8, "grammar": ANY_JSON},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k": {"temperature": 0.8, "top_k": 40},
    "penalties": {"temperature": 0.8, "presence_penalty": 0.5},
}


@dataclass(frozen=True, slots=True)
class Result:
    """Median milliseconds for the batch; `plain_ms` is 0 where plain torch alone cannot sample this kind."""

    kind: str
    ms: float
    plain_ms: float


def median_ms(call: Callable[[], object], rounds: int) -> float:
    """Of all calls but the first."""
    return statistics.median(seconds_of(call, rounds + 1)[1:]) * 1e3


def measure(kind: str, logits: torch.Tensor, grammars: Grammars, rounds: int) -> Result:
    batch, vocab = logits.shape
    fields = KINDS[kind]
    rows, draws = [], []
    for i in range(batch):
        params = SamplingParams(max_tokens=1, seed=i, **fields)  # type: ignore[arg-type]
        constraint = grammars.constraint(params.grammar) if params.grammar else None
        output = tuple(range(100)) if params.presence_penalty else ()
        rows.append(SamplingRow(params, 7, output, constraint=constraint))
        draws.append(Draw(params.temperature, params.top_k, params.top_p, params.min_p, i, 7))
    sampler = Sampler(vocab)
    ours = median_ms(lambda: sampler.sample(logits, rows), rounds)
    if fields.keys() & {"grammar", "presence_penalty"}:
        return Result(kind, ours, 0.0)
    plain = SamplingTensors.pack(draws, logits.device)
    return Result(kind, ours, median_ms(lambda: sample_by_sorting(logits, plain), max(3, rounds // 4)))


def parse(argv: Sequence[str]) -> Namespace:
    parser = script_parser(PROGRAM, __doc__, model="takes the vocabulary of this built-in name, folder or GGUF file")
    parser.add_argument("--batch", type=int, default=32, help="rows of logits")
    parser.add_argument("--threads", type=int, default=0, help="threads that compute; 0: one a core")
    parser.add_argument("--rounds", type=int, default=20, help="batches of each kind")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options, console = parse(argv), open_console()
    native = native_backend()
    if native is None:
        console.print("there is no C++ compiler, so there is nothing to compare plain torch with")
        return 2
    if options.threads:
        torch.set_num_threads(options.threads)
    files = resolve_model(options.model)
    memory = Arena().take(2**28).fill_(1)
    rate = memory.numel() / (median_ms(lambda: native.read(memory), 8) * 1e-3)
    logits = torch.randn(options.batch, files.vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    floor_ms = logits.numel() * 4 / rate * 1e3
    grammars = Grammars(files, files.vocab_size)
    grammars.constraint(ANY_JSON)  # its thread is idle once this is compiled
    results = [measure(kind, logits, grammars, options.rounds) for kind in KINDS]
    grammars.close()
    title = f"{options.batch} rows of {files.vocab_size:,}, {torch.get_num_threads()} threads; floor {floor_ms:.2f} ms"
    rows = []
    for result in results:
        plain = (f"{result.plain_ms:.2f}", f"{result.ms / result.plain_ms:.2f}") if result.plain_ms else ("", "")
        rows.append((result.kind, f"{result.ms:.2f}", f"{result.ms / floor_ms:.1f}", *plain))
    print_table(console, title, ("kind", "ms", "times the floor", "plain torch, ms", "of plain torch"), rows)
    content = {"floor_ms": floor_ms, "results": [asdict(result) for result in results]}
    write_result(options, PROGRAM, argv, content, model=files.model_id, threads=torch.get_num_threads())
    return 0


if __name__ == "__main__":
    run(main)
