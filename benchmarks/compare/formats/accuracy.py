"""What every format costs in accuracy: perplexity and greedy agreement, beside the model in float32 and llama.cpp.

Writes the model in each format into the cache, unless it is there. "exact" is the file dequantised to float32: what the
format alone loses. "served" is the file as `compare.formats` serves it: what serving adds. Of formats that llama.cpp
reads, its server reads the very file, and is asked for the likelihood of the same tokens behind the same ones.
Checkpoints are rounded to nearest, without calibration. Errors of ratios are standard errors over the passage's tokens.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from benchmarks.accuracy import PASSAGE, PROMPTS, Measured, Reference, Variant, perplexity
from benchmarks.compare.engines import PEERS, Engine, mixer, peer_engines, peer_environments
from benchmarks.compare.formats.catalogue import FORMATS, Format, choose
from benchmarks.compare.formats.files import bits_a_weight, bytes_by_type, write
from benchmarks.compare.formats.likelihoods import PeerScores, score_server
from benchmarks.compare.formats.loss import COLUMNS, PEER, cells, figures, markdown, ratio
from benchmarks.compare.peer import NUM_PORTS, PeerError
from benchmarks.compare.running import RunningEngine
from benchmarks.load.report import open_console, print_table
from benchmarks.script import run, script_parser, settings_of, write_result
from benchmarks.stack import free_port
from common.errors import ModelError
from common.model_files.files import ModelFiles
from common.model_files.resolve import resolve_model

PROGRAM: Final = "python -m benchmarks.compare.formats.accuracy"
EXACT: Final = Variant("float32", "none")
Read = Callable[[int], None]


def peer_of(one: Format) -> str | None:
    """The variant of llama.cpp that reads this format's own file."""
    variants = PEERS[PEER].variants
    return next((f"{PEER}:{name}" for name, source in variants.items() if source == one.source), None)


def own_figures(one: Format, path: Path, reference: Reference, floats: Tensor, read: Read) -> tuple[Tensor, Any]:
    """The likelihoods of the passage as this file is served, and the figures of the file, exact and as served."""
    files = resolve_model(str(path), progress=False)
    served = Variant("bfloat16", one.quantization)
    exact, found = (reference.score(Measured(one.name, files, variant), read) for variant in (EXACT, served))
    return found.logprobs, {"exact": figures(exact, floats), "served": figures(found, floats)}


def peer_scores(engine: Engine, reference: Reference, log_dir: Path, options: Namespace, read: Read) -> PeerScores:
    """Start the engine, score it and end it. Raises PeerError."""
    launch = engine.launch([free_port() for _ in range(NUM_PORTS)])
    with (
        RunningEngine(launch, log_dir, options.ready_timeout_s),
        httpx.Client(base_url=launch.url, trust_env=False) as client,
    ):
        return score_server(client, reference, read)


def measure(
    formats: Sequence[Format],
    paths: Mapping[str, Path],
    engines: Mapping[str, Engine],
    reference: Reference,
    floats: Tensor,
    options: Namespace,
    progress: Progress,
) -> dict[str, Any]:
    """A row for each format; `engines` are those of formats that llama.cpp reads, `floats` as in `figures`."""
    tokens = sum(map(len, reference.sequences))
    task = progress.add_task("", total=tokens * (2 * len(formats) + len(engines)))
    rows = {}
    with TemporaryDirectory() as logs:
        for one in formats:
            progress.update(task, description=one.about)
            read: Read = lambda count: progress.advance(task, count)  # noqa: E731
            logprobs, row = own_figures(one, paths[one.name], reference, floats, read)
            if one.name in engines:
                progress.update(task, description=f"{one.about}, {PEER}")
                theirs = peer_scores(engines[one.name], reference, Path(logs), options, read)
                row |= {PEER: figures(theirs, floats), "to_peer": ratio(logprobs, theirs.logprobs)}
            rows[one.name] = row
    return rows


def described(formats: Sequence[Format], paths: Mapping[str, Path], files: ModelFiles) -> dict[str, Any]:
    """Of each format its name, and what its file holds."""
    found = {}
    for one in formats:
        held = {kind: round(size / 1e6, 1) for kind, size in bytes_by_type(paths[one.name]).items()}
        about = "the model's own file" if one.source == "gguf" else one.about
        bits = round(bits_a_weight(paths[one.name], files), 3)
        found[one.name] = {"about": about, "bits_a_weight": bits, "file_mb": held}
    return found


def parse(argv: Sequence[str]) -> Namespace:
    parser = script_parser(PROGRAM, __doc__, model="GGUF file; a Llama model for safetensors formats")
    parser.add_argument("--formats", default=",".join(FORMATS), help="formats, separated by commas")
    parser.add_argument(
        "--llama-cpp",
        type=Path,
        metavar="DIR",
        help="folder of `python -m benchmarks.compare --prepare llama.cpp DIR`, for the peer and for K-quants",
    )
    parser.add_argument("--tokens", type=int, default=48, help="tokens per greedy answer")
    parser.add_argument(
        "--ready-timeout-s", type=float, default=600.0, help="maximum start time of llama.cpp, in seconds"
    )
    parser.add_argument("--show", type=Path, metavar="JSON", help="only print the table of this result")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Exit status 0, or 2 for refused settings and a peer that failed."""
    options, console = parse(argv), open_console()
    if options.show:
        print(markdown(json.loads(options.show.read_text())["formats"]))
        return 0
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    try:
        formats, files = choose(options.formats), resolve_model(options.model)
        environments = peer_environments([str(options.llama_cpp)], [PEERS[PEER]]) if options.llama_cpp else {}
        console.print(f"writing {len(formats)} formats of {files.model_id}", highlight=False)
        paths = write(files, formats, mixer(environments))
        with Progress(*columns, console=console, transient=True) as progress, torch.inference_mode():
            progress.add_task("answers in float32", total=None)
            reference = Reference.of(files, options.tokens)
            floats = reference.score(Measured("float32", files, EXACT)).logprobs
            engines = _engines(formats, environments, files, max(map(len, reference.sequences)))
            rows = measure(formats, paths, engines, reference, floats, options, progress)
    except (ValueError, PeerError, ModelError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    about = described(formats, paths, files)
    table = {name: about[name] | row for name, row in rows.items()}
    value, count = perplexity(floats), len(reference.passage)
    title = f"{files.model_id}: perplexity in float32 {value:.2f}; {len(PROMPTS)} answers of {options.tokens} tokens"
    print_table(console, title, COLUMNS, cells(table))
    more = {"text": PASSAGE.name, "text_tokens": count, "windows": 1, "answers": len(PROMPTS)}
    peers = {name: engine.about for name, engine in engines.items()}
    content = {"float32": {"perplexity": round(value, 4)}, "formats": table, PEER: peers}
    write_result(options, PROGRAM, argv, content, settings=settings_of(options), model=files.model_id, **more)
    return 0


def _engines(
    formats: Sequence[Format], environments: Mapping[str, Path], files: ModelFiles, longest: int
) -> dict[str, Engine]:
    """llama.cpp by the format whose file it reads, if it has an environment. Raises PeerError."""
    named = {one.name: peer for one in formats if environments and (peer := peer_of(one))}
    engines = peer_engines(list(named.values()), environments, files, -(-(longest + 1) // 256) * 256, 1)
    return dict(zip(named, engines, strict=True))


if __name__ == "__main__":
    run(main)
