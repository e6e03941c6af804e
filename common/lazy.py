"""Public APIs of packages: the module of a name is imported when the name is first used."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, from the imports of the stub `__init__.pyi` beside `file`.

    The stub is the one list of the package's names, which type checkers read too (PEP 562). A process so imports only
    what it uses: the router no torch, a worker that prints its help neither.
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
