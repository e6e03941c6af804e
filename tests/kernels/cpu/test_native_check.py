"""The native kernels against plain loops, with sanitizers: for this CPU, for older ones, and for ARM in an emulator."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]  # of compilers, on any machine
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")
NEEDED = {
    "native": set(),
    "x86-64-v4": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"},
    "x86-64-v3": {"avx2", "fma", "f16c", "bmi2"},
    "x86-64-v2": {"sse4_2"},
}
SLOWLY = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("x86-64-v4", "x86-64-v2")]
CROSS_COMPILERS = ("aarch64-linux-gnu-g++", *(f"aarch64-linux-gnu-g++-{version}" for version in range(16, 10, -1)))


def build(compiler: str, target: Path, repository: Path, *flags: str) -> str:
    """What the compiler said, or ""."""
    source = repository / "tests" / "kernels" / "native" / "check.cpp"
    command = [compiler, "-O1", "-std=c++17", f"-I{repository / 'kernels' / 'native'}", *flags, str(source)]
    done = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True, timeout=300)
    return done.stderr if done.returncode else ""


def skip_unless_it_runs(kind: str) -> None:
    if kind != "native" and platform.machine() != "x86_64":
        pytest.skip("names kinds of x86-64")
    if not NEEDED[kind] <= set(Path("/proc/cpuinfo").read_text("utf-8").split()):
        pytest.skip(f"this CPU is older than {kind}")


def run(*command: str) -> None:
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}  # which takes a process that traces this one
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" 0 failures\n")


@pytest.mark.parametrize("kind", ["native", "x86-64-v3", *SLOWLY])
def test_kernels_against_plain_loops(kind: str, tmp_path: Path, repository: Path) -> None:
    compiler = shutil.which("g++") or pytest.skip("no g++ here")
    skip_unless_it_runs(kind)
    target = tmp_path / "check"
    if build(compiler, target, repository, f"-march={kind}", *SANITIZERS):  # their libraries are not everywhere
        assert not build(compiler, target, repository, f"-march={kind}")
    run(str(target))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_narrower_registers_give_the_same(kind: str, tmp_path: Path, repository: Path) -> None:
    """AVX2, as most laptops have it, and SSE: compiled for them, the kernels pass their own tests."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler here")
    skip_unless_it_runs(kind)
    env = {**os.environ, "DIPTYCH_MARCH": kind, "DIPTYCH_CACHE": str(tmp_path)}
    names = ("test_attention", "test_elementwise", "test_embedding", "test_linear")
    tests = [f"tests/kernels/{name}.py" for name in (*names, "cpu/test_nibbles", "cpu/test_program")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", *tests]
    done = subprocess.run(command, cwd=repository, env=env, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    (built,) = (tmp_path / "native").iterdir()
    assert ctypes.CDLL(str(built)).diptych_panel() == {"x86-64-v4": 32, "x86-64-v3": 16, "x86-64-v2": 8}[kind]


@pytest.mark.parametrize("kind", ["armv8-a", "armv8.2-a+dotprod", "armv8.6-a"])
def test_kernels_of_arm(kind: str, tmp_path: Path, repository: Path) -> None:
    compiler = next((name for name in CROSS_COMPILERS if shutil.which(name)), "") or pytest.skip(
        "no compiler for ARM here"
    )
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64") or pytest.skip("no emulator here")
    target = tmp_path / "check"
    assert not build(compiler, target, repository, f"-march={kind}", "-static")
    run(emulator, str(target))
