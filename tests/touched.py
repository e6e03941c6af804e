"""Which folders of tests a change touches: `python tests/touched.py main` prints those of what differs from `main`.

A package is tested by the folder of its name. What runs in more than one process is tested by whole systems as well.
Programs of others in environments of their own (tests/clients) are for `make test-all` alone.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("benchmarks", "common", "decode_worker", "helm", "kernels", "prefill_worker", "router")
IN_SYSTEMS = {"common", "decode_worker", "kernels", "prefill_worker", "router"}
SYSTEMS = ("tests/chaos", "tests/e2e")
BY_HAND = "tests/clients/"
FOR_ALL = {"Makefile", "constraints.txt", "pyproject.toml"}


def touched(files: Iterable[str]) -> list[str]:
    """Paths to hand to pytest, for changed files named from the root of the repository."""
    paths: set[str] = set()
    for file in files:
        top, _, rest = file.partition("/")
        if file in FOR_ALL or (top == "tests" and "/" not in rest):
            return ["tests"]
        if top in PACKAGES:
            paths.add(f"tests/{top}")
        if top in IN_SYSTEMS:
            paths.update(SYSTEMS)
        if top == "tests" and not file.startswith(BY_HAND):
            paths.add("/".join(file.split("/")[:2]))
    return sorted(paths)


def changed(base: str) -> list[str]:
    """Files that differ between `base` and what is here. Raises subprocess.CalledProcessError for an unknown commit."""
    command = ["git", "diff", "--name-only", base, "--"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


if __name__ == "__main__":
    print(*touched(changed(sys.argv[1])))
