"""`diptych ps`: list the models that a running service serves."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from common.observe import in_bytes
from router.cli.client_flags import ps_parser
from router.cli.models.table import ago, clean, span, table
from router.cli.router_client import ROUTER_ANSWER_S, source_of

PROG = "diptych ps"
NAMES = ("NAME", "STATE", "REPLICAS", "WEIGHTS + KV", "IN FLIGHT", "LAST REQUEST", "UNLOADED")


def rows(load: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the models, without those that are not loaded but can be on demand.

    `replicas` are loaded workers by role. `memory_bytes` is None if that of one is unknown. `expires_in_s` is None for
    a model that is kept.
    """
    found = []
    for model in load["models"]:
        if model.get("state") == "idle":
            continue
        alone = len(load["models"]) == 1
        workers = [one for one in load["workers"] if (alone or one["model"] == model["root"]) and one["num_blocks"]]
        known = all(one["memory_bytes"] for one in workers)
        found.append(
            {
                "name": model["id"],
                "ready": model["ready"],
                "replicas": dict(Counter(one["role"] for one in workers)),
                "memory_bytes": sum(one["memory_bytes"] for one in workers) if known else None,
                "in_flight": model["num_in_flight"],
                "idle_s": model["idle_s"],
                "state": model.get("state"),
                "expires_in_s": model.get("expires_in_s"),
            }
        )
    return found


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    replicas = " + ".join(f"{count} {role}" for role, count in sorted(row["replicas"].items(), reverse=True))
    memory = row["memory_bytes"]
    last = "now" if row["in_flight"] else "-" if row["idle_s"] is None else ago(row["idle_s"])
    state = "ready" if row["ready"] else "not ready" if replicas else "unloaded"
    state = row["state"] or state
    ends = "never" if row["expires_in_s"] is None else f"in {span(row['expires_in_s'])}"
    in_memory = "-" if memory is None or not replicas else in_bytes(memory)
    unloaded = ends if replicas else "-"
    return tuple(map(clean, (row["name"], state, replicas or "-", in_memory, row["in_flight"], last, unloaded)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns exit status 0, 1 if no router answers, or 2 for invalid arguments."""
    options: argparse.Namespace = ps_parser().parse_args(argv)
    source = source_of(options, PROG)
    if source is None:
        return 2
    answer = source.ask_within(ROUTER_ANSWER_S)
    if answer.load is None:
        print(f"{PROG}: {source.url}: {answer.problem}", file=sys.stderr)
        return 1
    found = rows(answer.load)
    print(json.dumps(found, indent=2) if options.json else table(NAMES, [_cells(row) for row in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
