"""Speed of every format that Diptych serves on a CPU, of one model, beside llama.cpp and OpenVINO in the same rounds.

Writes the model in each format into the cache, unless it is there, and starts one engine at a time: the time of a token
of one stream, the prompt tokens a second of one long prompt, the output of many streams, and the memory of all
processes. The floor of a token is the bytes of the matrices that a step reads over the rate at which this machine reads
memory. Mixes of K-quants are written by llama.cpp's own tool, which gives other types to rows that 256 does not divide:
the table says what each file holds. `--random-k` measures a model of random weights of which they hold K-quants alone.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.diptych import DiptychVariant
from benchmarks.compare.engines import PEERS, Engine, choose_variant, mixer, peer_engines, peer_environments
from benchmarks.compare.formats.catalogue import FORMATS, Format, choose, nearest
from benchmarks.compare.formats.picture import plot
from benchmarks.compare.formats.table import COLUMNS, OWN, Held, Loads, beside, cells, figures, markdown
from benchmarks.compare.peer import PeerError
from benchmarks.compare.ratios import Load, rows
from benchmarks.compare.rounds import add_options, bounds, compare, describe_runs, token_ids
from benchmarks.load.report import open_console, print_table
from benchmarks.script import run, script_parser, settings_of, write_result
from common.errors import ModelError
from common.model_files.files import ModelFiles
from common.model_files.resolve import resolve_model

PROGRAM = "python -m benchmarks.compare.formats"
ENGINES = ("llama.cpp", "openvino")


def own_engines(
    formats: Sequence[Format], paths: Mapping[str, Path], options: Namespace, context: int, most: int
) -> list[Engine]:
    engines = []
    for one in formats:
        flags = f"--dtype bfloat16 --quantization {one.quantization}"
        variant = DiptychVariant.parse(f"{one.name}={flags}", options.diptych_args)
        launch = functools.partial(variant.launch, str(paths[one.name]), context, most)
        engines.append(Engine(OWN + one.name, launch, {"flags": list(variant.flags), "format": one.about}))
    return engines


def held_weights(
    formats: Sequence[Format], peers: Sequence[str], paths: Mapping[str, Path], weights: Mapping[str, Path]
) -> dict[str, Held]:
    """What the files of all engines hold, and of ours (`paths`, by format) what a step reads; `weights` are theirs."""
    from benchmarks.compare.formats.files import bytes_by_type, bytes_of_a_step

    held = {}
    for one in formats:
        path = paths[one.name]
        held[OWN + one.name] = Held(bytes_by_type(path), bytes_of_a_step(path, one.quantization))
    for name in peers:
        peer, variant = choose_variant(name)
        held[name] = Held(bytes_by_type(weights[peer.variants[variant]]))
    return held


def parse(argv: Sequence[str]) -> Namespace:
    parser = script_parser(PROGRAM, __doc__, model="GGUF file; a Llama model for safetensors formats", plot=True)
    parser.add_argument("--formats", default=",".join(FORMATS), help="formats, separated by commas")
    parser.add_argument("--peers", default=",".join(ENGINES), help="peer engines, separated by commas; empty for none")
    parser.add_argument(
        "--peer-env",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="folder of `python -m benchmarks.compare --prepare` for a peer",
    )
    parser.add_argument("--random-k", action="store_true", help="use random weights with the tokenizer of --model")
    parser.add_argument("--diptych-args", default="", metavar="ARGS", help="additional flags for all formats")
    parser.add_argument("--tokens", type=int, default=128, help="prompt and output tokens per stream")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the long prompt")
    parser.add_argument("--streams", type=int, default=32, help="number of streams of the third load")
    parser.add_argument("--show", type=Path, metavar="JSON", help="only print the table of this result")
    add_options(parser, repeats=2, per_user=1, least=4)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Exit status 0, 1 when an engine failed or a run did not count, 2 for refused settings."""
    options, console = parse(argv), open_console()
    if options.show:
        print(markdown(json.loads(options.show.read_text())["formats"]))
        return 0
    one = Load(options.tokens, options.tokens, 1)
    loads = Loads(one, Load(options.prompt, 2, 1), Load(options.tokens, options.tokens, options.streams))
    context, most = bounds(loads.all())
    try:
        formats, engines = choose(options.formats), _engines(options.peers)
        files, names = _files(options), nearest(formats, engines)
        environments = peer_environments(options.peer_env, [PEERS[name] for name in ENGINES])
        console.print(f"writing {len(formats)} formats of {files.model_id}", highlight=False)
        peers = peer_engines(names, environments, files, context, most)
        from benchmarks.compare.formats.files import reading_rate, write  # torch takes seconds to import
        from benchmarks.compare.weights import convert

        mix = mixer(environments)
        paths = write(files, formats, mix)
        weights = convert(files, [engine.about["format"] for engine in peers], mix)
        held, rate = held_weights(formats, names, paths, weights), reading_rate()
    except (ValueError, PeerError, ModelError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    all_engines = [*own_engines(formats, paths, options, context, most), *peers]
    results, runs = compare(all_engines, loads.all(), token_ids(files), options, console)
    about = {engine.name: {**engine.about, **describe_runs(runs[engine.name])} for engine in all_engines}
    table: dict[str, dict[str, Any]] = {
        name: figures(by_load, loads, held[name], about[name]["memory_mib"], rate) for name, by_load in results.items()
    }
    for form in formats:
        row = table[OWN + form.name]
        row |= {"about": form.about, "beside": beside(row, table, form.peers)}
    title = f"{files.model_id}: {', '.join(map(str, loads.all()))}; memory is read at {rate / 1e9:.1f} GB/s"
    print_table(console, title, COLUMNS, cells(table), left=(0, 1, 8))
    content = {"engines": about, "formats": table, "rows": rows(results, [], [])}
    write_result(options, PROGRAM, argv, content, settings=settings_of(options), read_bytes_per_s=round(rate))
    if options.plot:
        plot(options.plot, table, f"{options.model}, {options.repeats} round(s), {os.cpu_count()} cores")
    shown = [cell for by_load in results.values() for cell in by_load.values()]
    for problem in (problem for cell in shown for problem in cell.problems):
        console.print(f"not counted: {problem[:200]}", highlight=False, markup=False)
    return int(any(cell.problems or not cell.medians() for cell in shown))


def _files(options: Namespace) -> ModelFiles:
    """Raises PeerError and ModelError."""
    files = resolve_model(options.model)
    if not options.random_k:
        return files
    from benchmarks.compare.formats.random_k import Shape, random_file

    return resolve_model(str(random_file(files, Shape())))


def _engines(names: str) -> list[str]:
    """Raises ValueError."""
    found = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in found if name not in ENGINES]:
        raise ValueError(f"--peers {names!r}: {unknown} named; known are {', '.join(ENGINES)}")
    return found


if __name__ == "__main__":
    run(main)
