"""Writes the requirements of the images with file hashes: `make lock`.

router.txt and worker.txt exclude torch, because its build depends on the accelerator. cuda.txt is PyPI's torch, the
CUDA build, with the CUDA libraries and Triton that it needs. nixl.txt is the optional KV transport. Versions come from
constraints.txt.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
EXTRAS = {"router": ("router", "tracing", "hub"), "worker": ("worker", "hub")}
OF_TORCH = re.compile(r"^(torch|triton|nvidia-|cuda-)")
OF_NIXL = re.compile(r"^nixl")
HEADER = "# {what}. `make lock` writes it from constraints.txt.\n"


def entries(text: str) -> Iterator[tuple[str, str]]:
    """Yield (name, lines) for each package of a requirements file."""
    for entry in re.split(r"\n(?=\S)", text.strip()):
        if not entry.startswith("#"):
            yield re.split(r"[=\s;\[]", entry, maxsplit=1)[0], entry


def selected(text: str, pattern: re.Pattern[str]) -> str:
    """Return the packages whose names match."""
    return "".join(f"{lines}\n" for name, lines in entries(text) if pattern.match(name))


def without_torch(text: str) -> str:
    return "".join(f"{lines}\n" for name, lines in entries(text) if not OF_TORCH.match(name))


def requirements(*extras: str) -> list[str]:
    """Return what every process and these extras need, without the packages that an installation has by default."""
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())["project"]
    common = [line for line in project["dependencies"] if not line.startswith("diptych[")]
    return [*common, *(line for extra in extras for line in project["optional-dependencies"][extra])]


def resolve(*extras: str) -> str:
    """Resolve the packages of extras on Linux with uv, using the index that its environment configures."""
    uv = shutil.which("uv") or sys.exit("write_requirements needs uv: pip install uv")
    command = [uv, "pip", "compile", "--quiet", "-", "--generate-hashes"]
    command += ["-c", str(FOLDER / "constraints.txt"), "--python-version", "3.11", "--python-platform", "linux"]
    command += ["--no-header", "--no-annotate", "--no-emit-index-url"]
    lines = "\n".join(requirements(*extras))
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=600, check=False)
    return done.stdout if done.returncode == 0 else sys.exit(done.stderr)


def files() -> dict[str, str]:
    """Return the contents of all files by name."""
    router, worker, nixl = resolve(*EXTRAS["router"]), resolve(*EXTRAS["worker"]), resolve("worker", "nixl")
    what = "Packages of the {} image, except Diptych and torch"
    return {
        "router": HEADER.format(what=what.format("router")) + without_torch(router),
        "worker": HEADER.format(what=what.format("worker")) + without_torch(worker),
        "cuda": HEADER.format(what="torch of PyPI and the CUDA libraries that it pins") + selected(worker, OF_TORCH),
        "nixl": HEADER.format(what="NIXL, for images built with NIXL=yes") + selected(nixl, OF_NIXL),
    }


if __name__ == "__main__":
    for name, text in files().items():
        (FOLDER / f"{name}.txt").write_text(text)
