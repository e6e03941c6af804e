"""What it costs a CPU to draw a step's tokens, beside plain torch and the floor.

The floor is to read the logits once. Plain torch is the draw that serves where there is no compiler, one sort of a row
with top_k or top_p. Logits are random, without the few likely tokens that a model's have, which is the harder case.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from rich.table import Table

from benchmarks.conditions import conditions
from benchmarks.report import open_console, write_json
from common.grammar.grammars import Grammars
from common.model_files.resolve import resolve_model
from common.sampling.sampler import Sampler, SamplingRow
from common.wire.sampling_params import SamplingParams
from kernels import Draw, SamplingTensors
from kernels.cpu.backend import native_backend
from kernels.cpu.large_pages import Arena
from kernels.sampling import sample_by_sorting

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
    """Milliseconds for the batch, medians; plain_ms 0 where plain torch alone does not do it."""

    kind: str
    ms: float
    plain_ms: float


def median_ms(call: Callable[[], object], rounds: int) -> float:
    seconds = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:]) * 1e3


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


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2-135m", help="whose vocabulary: built-in name, folder or GGUF file")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=0, help="0: one a core")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, help="JSON file to write the results to")
    options, console = parser.parse_args(arguments), open_console()
    native = native_backend()
    if native is None:
        console.print("there is no C++ compiler, so there is nothing to compare plain torch with")
        return 2
    if options.threads:
        torch.set_num_threads(options.threads)
    files = resolve_model(options.model)
    grammars = Grammars(files, files.vocab_size)
    grammars.constraint(ANY_JSON)  # from here on its thread has nothing to do
    memory = Arena().take(2**28).fill_(1)
    rate = memory.numel() / (median_ms(lambda: native.read(memory), 8) * 1e-3)
    logits = torch.randn(options.batch, files.vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    floor_ms = logits.numel() * 4 / rate * 1e3
    title = f"{options.batch} rows of {files.vocab_size:,}, {torch.get_num_threads()} threads; floor {floor_ms:.2f} ms"
    table = Table(title=title)
    for column in ("kind", "ms", "times the floor", "plain torch, ms", "of plain torch"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    results = [measure(kind, logits, grammars, options.rounds) for kind in KINDS]
    grammars.close()
    for result in results:
        plain = (f"{result.plain_ms:.2f}", f"{result.ms / result.plain_ms:.2f}") if result.plain_ms else ("", "")
        table.add_row(result.kind, f"{result.ms:.2f}", f"{result.ms / floor_ms:.1f}", *plain)
    console.print(table)
    if options.output:
        about = conditions(PROGRAM, arguments, model=files.model_id, threads=torch.get_num_threads())
        rows = [asdict(result) for result in results]
        write_json(options.output, {"conditions": about, "floor_ms": floor_ms, "results": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
