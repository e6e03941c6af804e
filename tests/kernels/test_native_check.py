"""The native kernels against plain loops, with sanitizers: for this CPU, for older ones, and for ARM in an emulator."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(400)  # of compilers, on any machine
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")
NEEDED = {"native": set(), "x86-64-v3": {"avx2", "fma", "f16c", "bmi2"}, "x86-64-v2": {"sse4_2"}}
CROSS_COMPILERS = ("aarch64-linux-gnu-g++", *(f"aarch64-linux-gnu-g++-{version}" for version in range(16, 10, -1)))


def build(compiler: str, target: Path, repository: Path, *flags: str) -> str:
    """What the compiler said, or ""."""
    source = repository / "tests" / "kernels" / "native" / "check.cpp"
    command = [compiler, "-O1", "-std=c++17", f"-I{repository / 'kernels' / 'native'}", *flags, str(source)]
    done = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True, timeout=300)
    return done.stderr if done.returncode else ""


def run(*command: str) -> None:
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}  # which takes a process that traces this one
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" 0 failures\n")


@pytest.mark.parametrize("kind", ["native", "x86-64-v3", pytest.param("x86-64-v2", marks=pytest.mark.slow)])
def test_kernels_against_plain_loops(kind: str, tmp_path: Path, repository: Path) -> None:
    compiler = shutil.which("g++") or pytest.skip("no g++ here")
    if kind != "native" and platform.machine() != "x86_64":
        pytest.skip("names kinds of x86-64")
    if not NEEDED[kind] <= set(Path("/proc/cpuinfo").read_text("utf-8").split()):
        pytest.skip(f"this CPU is older than {kind}")
    target = tmp_path / "check"
    if build(compiler, target, repository, f"-march={kind}", *SANITIZERS):  # their libraries are not everywhere
        assert not build(compiler, target, repository, f"-march={kind}")
    run(str(target))


@pytest.mark.parametrize("kind", ["armv8-a", "armv8.2-a+dotprod", "armv8.6-a"])
def test_kernels_of_arm(kind: str, tmp_path: Path, repository: Path) -> None:
    compiler = next((name for name in CROSS_COMPILERS if shutil.which(name)), "") or pytest.skip(
        "no compiler for ARM here"
    )
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64") or pytest.skip("no emulator here")
    target = tmp_path / "check"
    assert not build(compiler, target, repository, f"-march={kind}", "-static")
    run(emulator, str(target))
