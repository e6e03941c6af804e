from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.kernels import native_build

pytestmark = pytest.mark.timeout(400)  # of compilers, on any machine


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path))


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert native_build.load_native.__wrapped__() is None
    assert "no C++ compiler" in caplog.text and "torch path" in caplog.text


def test_a_broken_compiler_is_a_reason_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    assert native_build.load_native.__wrapped__() is None
    assert "/bin/false" in caplog.text


def test_the_library_is_built_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    if native_build.load_native.__wrapped__() is None:
        pytest.skip("no C++ compiler here")
    (built,) = (tmp_path / "native").iterdir()
    stamp = built.stat().st_mtime_ns
    assert native_build.load_native.__wrapped__() is not None
    assert built.stat().st_mtime_ns == stamp


def test_a_damaged_library_is_built_again(tmp_path: Path) -> None:
    if native_build.load_native.__wrapped__() is None:
        pytest.skip("no C++ compiler here")
    (built,) = (tmp_path / "native").iterdir()
    copy = built.with_suffix(".bad")
    copy.write_bytes(b"not a library")
    copy.replace(built)
    assert native_build.load_native.__wrapped__() is not None


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    compiler, calls = tmp_path / "compiler", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\necho $PPID >> {calls}\nexec {shutil.which("c++")} "$@"\n')
    compiler.chmod(0o755)
    env = {**os.environ, "CXX": str(compiler), "DIPTYCH_CACHE": str(tmp_path)}
    program = "from diptych.kernels.native_build import load_native; assert load_native() is not None"
    started = [subprocess.Popen([sys.executable, "-P", "-c", program], env=env) for _ in range(2)]
    assert [process.wait(350) for process in started] == [0, 0]
    assert len(set(calls.read_text().split())) == 1, "both of them compiled"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names kinds of x86-64")
@pytest.mark.parametrize("kind", ["x86-64-v3", pytest.param("x86-64-v2", marks=pytest.mark.slow)])
def test_kernels_for_narrower_registers_compute_the_same(kind: str, tmp_path: Path, repository: Path) -> None:
    """AVX2, as most laptops have it, and SSE: compiled for them, the kernels' own tests pass."""
    if shutil.which("c++") is None or not _runs(kind):
        pytest.skip(f"no C++ compiler here, or a CPU older than {kind}")
    env = {**os.environ, "DIPTYCH_MARCH": kind, "DIPTYCH_CACHE": str(tmp_path)}
    tests = [f"tests/kernels/test_{name}.py" for name in ("attention", "elementwise", "embedding", "linear", "program")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", *tests]
    done = subprocess.run(command, cwd=repository, env=env, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    (built,) = (tmp_path / "native").iterdir()
    assert ctypes.CDLL(str(built)).diptych_panel() == {"x86-64-v3": 16, "x86-64-v2": 8}[kind]


def _runs(kind: str) -> bool:
    needed = {"x86-64-v3": {"avx2", "fma", "f16c", "bmi2"}, "x86-64-v2": {"sse4_2"}}[kind]
    try:
        words = set(Path("/proc/cpuinfo").read_text("utf-8").split())
    except OSError:
        return False
    return needed <= words
