"""Writes router.txt and worker.txt, the requirements of the images with file hashes: `make lock`.

Versions come from constraints.txt. torch is excluded because its build depends on the accelerator: the Dockerfile
installs it by version, and the build pins its own dependencies (CUDA libraries, Triton).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
EXTRAS = {"router": ("router", "tracing", "hub"), "worker": ("worker", "hub")}
OF_TORCH = re.compile(r"^(torch|triton|nvidia-|cuda-)")
HEADER = "# Packages of the {name} image, except Diptych and torch. `make lock` writes it from constraints.txt.\n"


def entries(text: str) -> Iterator[tuple[str, str]]:
    """Yield (name, lines) for each package of a requirements file."""
    for entry in re.split(r"\n(?=\S)", text.strip()):
        if not entry.startswith("#"):
            yield re.split(r"[=\s;\[]", entry, maxsplit=1)[0], entry


def without_torch(text: str) -> str:
    return "".join(f"{lines}\n" for name, lines in entries(text) if not OF_TORCH.match(name))


def resolve(name: str) -> str:
    """Resolve the packages of an image on Linux with uv, using the index that its environment configures."""
    uv = shutil.which("uv") or sys.exit("write_requirements needs uv: pip install uv")
    extras = [flag for extra in EXTRAS[name] for flag in ("--extra", extra)]
    command = [uv, "pip", "compile", "--quiet", str(FOLDER.parents[1] / "pyproject.toml"), *extras, "--generate-hashes"]
    command += ["-c", str(FOLDER / "constraints.txt"), "--python-version", "3.11", "--python-platform", "linux"]
    command += ["--no-header", "--no-annotate", "--no-emit-index-url"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    return done.stdout if done.returncode == 0 else sys.exit(done.stderr)


if __name__ == "__main__":
    for image in EXTRAS:
        (FOLDER / f"{image}.txt").write_text(HEADER.format(name=image) + without_torch(resolve(image)))
