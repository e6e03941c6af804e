"""The folders of this project are the packages that it imports, by names that others may have as well.

So Diptych has an environment of its own. Where it has not, and another `kernels` comes first on the path, what would
follow is an ImportError that explains nothing: `warn_of_strangers` says before what is the matter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

PACKAGES: Final = ("kernels", "common", "prefill_worker", "decode_worker", "router", "benchmarks")

_ROOT: Final = Path(__file__).resolve().parents[1]


def strangers(root: Path = _ROOT) -> Iterator[tuple[str, str]]:
    """(name, where it is) of each package that is not imported from `root`. Nothing is imported to find that out."""
    for name in PACKAGES:
        spec = find_spec(name)
        if spec is None:
            continue
        places = list(spec.submodule_search_locations or ()) or [spec.origin or "nowhere"]
        if Path(places[0]).resolve() != root / name:
            yield name, places[0]


def warn_of_strangers() -> None:
    """One line on stderr for each name that another package has taken."""
    for name, place in strangers():
        print(
            f"diptych: warning: the package {name} comes from {place}, not from {_ROOT / name}: another one of that "
            "name is installed here or on PYTHONPATH. Give Diptych an environment of its own.",
            file=sys.stderr,
        )
