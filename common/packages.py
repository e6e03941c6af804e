"""Warns when Python would import another project's package of the same name, such as `kernels`, instead of ours.

Diptych should have an environment of its own. Where it has none and another package comes first on the path, an
ImportError would follow that explains nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

PACKAGES: Final = ("kernels", "common", "prefill_worker", "decode_worker", "router", "benchmarks")

_ROOT: Final = Path(__file__).resolve().parents[1]


def foreign_packages(root: Path = _ROOT) -> Iterator[tuple[str, str]]:
    """(name, place) of each package that Python would import from elsewhere than `root`. Imports nothing."""
    for name in PACKAGES:
        spec = find_spec(name)
        if spec is None:
            continue
        places = list(spec.submodule_search_locations or ()) or [spec.origin or "nowhere"]
        if Path(places[0]).resolve() != root / name:
            yield name, places[0]


def warn_of_foreign_packages() -> None:
    """Print a line on stderr for each name that another package has taken."""
    for name, place in foreign_packages():
        print(
            f"diptych: warning: the package {name} comes from {place}, not from {_ROOT / name}: another one of that "
            "name is installed here or on PYTHONPATH. Give Diptych an environment of its own.",
            file=sys.stderr,
        )
