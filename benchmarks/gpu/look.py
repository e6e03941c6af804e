"""`python -m benchmarks.gpu.look`: checks that this machine can run Diptych on its GPU, or names the gaps."""

from __future__ import annotations

import importlib
import platform
import sys

from benchmarks.load.conditions import version_of

MODULES = (
    "benchmarks.gpu.node.run",
    "benchmarks.gpu.worker",
    "benchmarks.stack",
    "router.server.server",
    "pytest_asyncio",
    "pytest_timeout",
    "transformers",
)
"""The programs, and the packages of the tests: `answers` compares with transformers."""
PACKAGES = ("torch", "triton", "numpy", "pyzmq", "tokenizers", "transformers", "pytest", "typing_extensions")


def problem_of(module: str) -> str:
    """The error of a module's import, or ""."""
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{module}: {type(error).__name__}: {error}"
    return ""


def device_problem() -> str:
    """The error of a first computation on the device, or ""."""
    import torch

    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        found = float(torch.ones(1000, device="cuda").sum())
    except RuntimeError as error:
        return f"the device: {error}"
    free, total = torch.cuda.mem_get_info()
    print(f"{torch.cuda.get_device_name()}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    return "" if found == 1000.0 else f"a thousand ones are {found}"


def main() -> int:
    print("Python", platform.python_version(), *(f"{name} {version_of(name) or 'missing'}" for name in PACKAGES))
    problems = [problem for problem in (*map(problem_of, MODULES), device_problem()) if problem]
    print("\n".join(problems) or "everything is here")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
