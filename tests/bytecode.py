"""Shares the compilation of a fresh checkout among the processes of a test run.

Every process imports every test file to collect the tests. On a fresh checkout each of them would rewrite the
assertions of all files and compile them, which takes as long as everything else in the collection.
"""

from __future__ import annotations

import importlib.util
import py_compile
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def write_share(files: Sequence[Path], number: int, count: int, config: pytest.Config) -> None:
    """Write the bytecode of every `count`th file, beginning with `number`, unless newer bytecode exists.

    Assertions are rewritten in the files that pytest collects, as its import hook would do.
    """
    if sys.dont_write_bytecode:
        return
    for file in files[number::count]:
        if not (file.name.startswith("test_") or file.name == "conftest.py"):
            if not _is_newer(Path(importlib.util.cache_from_source(str(file))), file):
                py_compile.compile(str(file), quiet=2)
            continue
        bytecode = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
        if not _is_newer(bytecode, file) and rewrite.try_makedirs(bytecode.parent):
            status, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, status, bytecode)


def _is_newer(bytecode: Path, source: Path) -> bool:
    return bytecode.exists() and bytecode.stat().st_mtime >= source.stat().st_mtime
