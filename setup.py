"""The CPU's kernels inside a wheel: with DIPTYCH_KERNELS set, one library for each instruction set that it names.

    DIPTYCH_KERNELS=all pip wheel .         all of this kind of machine (kernels/cpu/instruction_sets.py)
    DIPTYCH_KERNELS=avx2,avx512 pip wheel . these
    pip wheel .                             none: kernels are compiled where they run, as in a source checkout

Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import os
import platform
import re
import runpy
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# These two import nothing of ours: the environment of a build has neither torch nor our packages.
COMPILER = runpy.run_path(str(ROOT / "kernels" / "cpu" / "compiler.py"))
SETS = runpy.run_path(str(ROOT / "kernels" / "cpu" / "instruction_sets.py"))
MACHINE = platform.machine() if sys.platform == "linux" else sys.platform
FOLDER = Path("kernels", "native", "built")
GLIBC = re.compile(rb"\bGLIBC_2\.(\d+)")


def wanted() -> tuple:
    """The instruction sets that DIPTYCH_KERNELS names."""
    names = os.environ.get("DIPTYCH_KERNELS", "")
    try:
        return SETS["chosen"](names, MACHINE) if names else ()
    except ValueError as error:
        raise SystemExit(str(error)) from None


def compile_all(sets: tuple, folder: Path) -> None:
    """The libraries of these instruction sets, as many at a time as there are cores."""
    if not (compiler := COMPILER["find_compiler"]()):
        raise SystemExit("DIPTYCH_KERNELS needs a C++ compiler: " + ", ".join(COMPILER["COMPILERS"]) + ", or CXX")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as threads:

        def one(each) -> None:
            library = folder / f"{each.name}.so"
            print(f"compiling CPU kernels for {each.name}", flush=True)
            try:
                COMPILER["compile_for_others"](compiler, each.flags, Path(scratch), library)
            except (OSError, subprocess.SubprocessError) as error:
                reason = getattr(error, "stderr", "") or error
                raise SystemExit(f"{compiler} cannot compile for {each.name}: {reason}") from None
            if b"__kmpc_fork_call" in library.read_bytes():
                raise SystemExit(f"{compiler} calls Clang's OpenMP runtime, and torch brings GCC's: set CXX to a g++")

        list(threads.map(one, sets))


class BuildWithKernels(build_py):
    """Compiles into the folder of the build, never into the source tree."""

    def run(self) -> None:
        sets = wanted()
        super().run()
        if sets and not self.editable_mode:
            compile_all(sets, Path(self.build_lib) / FOLDER)
        if not self.editable_mode:  # a wheel has no repository to ask (common/version.py)
            (Path(self.build_lib) / "common" / "version.txt").write_text(self.distribution.get_version() + "\n")


class DiptychDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        """With libraries inside, a wheel is no pure one, though they are no modules."""
        return bool(wanted()) or super().has_ext_modules()


class WheelForOneMachine(bdist_wheel):
    """With libraries inside, a wheel is for one kind of machine and any Python."""

    def get_tag(self) -> tuple[str, str, str]:
        if not wanted():
            return super().get_tag()
        libraries = sorted((Path(self.get_finalized_command("build_py").build_lib) / FOLDER).glob("*.so"))
        # The wheel runs on every glibc that has what the libraries ask for (PEP 600); 2.17 is the oldest of these tags.
        least = max((int(each) for file in libraries for each in GLIBC.findall(file.read_bytes())), default=17)
        return "py3", "none", f"manylinux_2_{max(17, least)}_{MACHINE}"


setup(distclass=DiptychDistribution, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelForOneMachine})
