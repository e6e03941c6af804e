"""Packages in the environment: those of extras, and other distributions' packages of the same name, such as `kernels`.

Diptych should have its own environment. If another package comes first on the path, the resulting ImportError would be
misleading.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

PACKAGES: Final = ("kernels", "common", "prefill_worker", "decode_worker", "router", "benchmarks")

_ROOT: Final = Path(__file__).resolve().parents[1]


def install_command(extra: str) -> str:
    """Return the command that adds the packages of an extra to this environment, from a wheel or a checkout alike."""
    return f"{sys.executable} -m pip install 'diptych[{extra}]'"


def foreign_packages(root: Path = _ROOT) -> Iterator[tuple[str, str]]:
    """Iterate over (name, location) of packages that Python would not import from `root`. Imports nothing."""
    for name in PACKAGES:
        spec = find_spec(name)
        if spec is None:
            continue
        places = list(spec.submodule_search_locations or ()) or [spec.origin or "nowhere"]
        if Path(places[0]).resolve() != root / name:
            yield name, places[0]


def warn_of_foreign_packages() -> None:
    """Print a warning on stderr for each package name used by another distribution."""
    for name, place in foreign_packages():
        print(
            f"diptych: warning: the package {name} would be imported from {place} instead of {_ROOT / name}, because "
            "another package of this name is installed or on PYTHONPATH. Install Diptych into its own environment.",
            file=sys.stderr,
        )
