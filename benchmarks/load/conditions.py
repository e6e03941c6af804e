"""The conditions of a measurement: date, machine, versions and the command that repeats it."""

from __future__ import annotations

import os
import platform
import re
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from common import __version__

PACKAGES = ("torch", "pyzmq", "tokenizers", "numpy", "uvloop")
SECRET_FLAGS = ("--api-key",)


def conditions(program: str, argv: Sequence[str], **more: Any) -> dict[str, Any]:
    """Date, machine, versions and command line as JSON values, and `more`; without secrets and folders."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([*program.split(), *map(without_folders, _without_secrets(argv))]),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {"diptych": __version__, **{name: found for name in PACKAGES if (found := version_of(name))}},
        **more,
    }


def cpu_model() -> str:
    """As /proc/cpuinfo names it, or the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def version_of(package: str) -> str:
    """The version of an installed package, or ""."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _without_secrets(argv: Sequence[str]) -> list[str]:
    shown: list[str] = []
    for argument in argv:
        name, equals, _ = argument.partition("=")
        if shown and shown[-1] in SECRET_FLAGS:
            shown.append("***")
        else:
            shown.append(f"{name}=***" if equals and name in SECRET_FLAGS else argument)
    return shown


def without_folders(argument: str) -> str:
    """`--output=/a/b.json` as `--output=b.json`: results are published, and their folders mean nothing elsewhere."""
    return re.sub(r"(^|(?<=[=,]))/[^\s,=]*?([^/\s,=]+)/?(?=$|,)", r"\2", argument)
