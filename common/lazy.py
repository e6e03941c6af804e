"""Public APIs of packages, whose modules are imported when a name is first used."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package from the stub `__init__.pyi` next to `file` (PEP 562).

    The stub is the only list of the package's names, and is also read by type checkers. A process imports only what it
    uses: neither a router nor `--help` of a worker imports torch.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    homes = {
        alias.name: str(node.module) for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"package {package!r} has no public name {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return get, lambda: sorted(homes), sorted(homes)
