"""How many schemas of a corpus are served, beside llguidance alone; whether answers match; what masks cost.

Answers are random walks through a schema's grammar, judged by the library jsonschema. Corpora: a clone of
https://github.com/guidance-ai/jsonschemabench has JSONSchemaBench in `data/`, and in `maskbench/data/` the same schemas
with documents that are known to match or not.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.load.report import open_console, print_table
from benchmarks.schemas.corpus import samples_of
from benchmarks.schemas.documents import Documents
from benchmarks.schemas.trial import Trial, tried
from benchmarks.script import run, script_parser, write_result
from common.grammar.checks import GrammarChecks
from common.model_files.resolve import resolve_model

PROGRAM: Final = "python -m benchmarks.schemas"
MAX_WRONG = 20
"""Wrong answers of one split that the report lists."""
QUANTILES = (0.5, 0.99)


def parse(argv: Sequence[str]) -> Namespace:
    parser = script_parser(PROGRAM, __doc__, model="takes the vocabulary of this built-in name, folder or GGUF file")
    parser.add_argument("corpus", type=Path, nargs="+", help="folders of JSON schemas, JSON files or JSONL files")
    parser.add_argument("--documents", type=int, default=5, help="random answers of each schema")
    parser.add_argument("--every", type=int, default=1, help="try every so-manieth schema only")
    parser.add_argument("--seed", default="0", help="of the random answers")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Returns 1 if any answer was wrong."""
    options, console = parse(argv), open_console()
    files = resolve_model(options.model)
    documents, checks = Documents(files), GrammarChecks(files, files.vocab_size)
    trials: dict[str, list[Trial]] = {}
    masks: dict[str, list[float]] = {}
    try:
        for number, sample in enumerate(samples_of(options.corpus)):
            if number % options.every == 0:
                documents.mask_s.clear()
                trial = tried(sample, documents, checks, options.documents, options.seed)
                trials.setdefault(sample.split, []).append(trial)
                masks.setdefault(sample.split, []).extend(documents.mask_s)
    finally:
        checks.close()
    splits = [_split(name, found, masks[name]) for name, found in sorted(trials.items())]
    columns = (
        "split",
        "schemas",
        "refused",
        "by llguidance",
        "answers",
        "wrong",
        "valid refused",
        "compile ms",
        "mask us",
    )
    print_table(console, "JSON schemas", columns, [_row(split) for split in splits])
    for key, title in (("refusals", "Refused"), ("llguidance_refusals", "Refused by llguidance alone")):
        reasons: Counter[str] = sum((Counter(split[key]) for split in splits), Counter())
        print_table(console, title, ("reason", "schemas"), [(why, str(n)) for why, n in reasons.most_common(20)])
    for split in splits:
        for wrong in split["wrong_answers"]:
            console.print(wrong, markup=False)
    settings = {"documents": options.documents, "every": options.every, "seed": options.seed}
    content = {"settings": settings, "splits": splits}
    write_result(options, PROGRAM, argv, content, model=files.model_id)
    return int(any(split["wrong"] for split in splits))


def _split(name: str, trials: Sequence[Trial], masks: Sequence[float]) -> dict[str, Any]:
    served = [trial for trial in trials if not trial.refusal]
    return {
        "split": name,
        "schemas": len(trials),
        "refused": len(trials) - len(served),
        "refused_by_llguidance": sum(bool(trial.plain_refusal) for trial in trials),
        "refused_only_here": sorted(t.name for t in trials if t.refusal and not t.plain_refusal),
        "refusals": dict(Counter(trial.refusal for trial in trials if trial.refusal).most_common()),
        "llguidance_refusals": dict(Counter(t.plain_refusal for t in trials if t.plain_refusal).most_common()),
        "answers": sum(trial.num_documents for trial in served),
        "answers_not_judged": sum(trial.num_unjudged for trial in served),
        "walks_without_end": sum(trial.num_unfinished for trial in served),
        "walks_stuck": {trial.name: trial.stuck for trial in served if trial.stuck},
        "wrong": sum(len(trial.wrong) for trial in served),
        "wrong_answers": [f"{t.name}: {wrong[:500]}" for t in served for wrong in t.wrong][:MAX_WRONG],
        "valid_documents": sum(trial.num_valid for trial in served),
        "valid_documents_refused": sum(trial.num_valid_refused for trial in served),
        "invalid_documents": sum(trial.num_invalid for trial in served),
        "compile_ms": _quantiles([trial.compile_s for trial in served], 1e3),
        "mask_us": _quantiles(masks, 1e6),
    }


def _quantiles(seconds: Sequence[float], scale: float) -> dict[str, float]:
    values = np.quantile(seconds, QUANTILES) if seconds else np.zeros(len(QUANTILES))
    return {f"p{q * 100:g}": round(float(value) * scale, 2) for q, value in zip(QUANTILES, values, strict=True)}


def _row(split: dict[str, Any]) -> tuple[str, ...]:
    plain = (split[key] for key in ("split", "schemas", "refused", "refused_by_llguidance", "answers", "wrong"))
    refused = f"{split['valid_documents_refused']}/{split['valid_documents']}"
    times = (" / ".join(f"{value:g}" for value in split[key].values()) for key in ("compile_ms", "mask_us"))
    return (*map(str, plain), refused, *times)


if __name__ == "__main__":
    run(main)
