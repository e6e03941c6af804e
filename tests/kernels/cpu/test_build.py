from __future__ import annotations

import fcntl
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernels.cpu import build as native_build
from kernels.cpu import compiler as compiling
from kernels.cpu.instruction_sets import features_here, of_machine, that_run

from ...waiting import wait_until

pytestmark = pytest.mark.timeout(400)  # of compilers, on any machine
LOADS = "from kernels.cpu.build import load_native; assert load_native() is not None"


@pytest.fixture(scope="module")
def library() -> Path:
    """The kernels as this machine's compiler made them, once for all tests."""
    loaded = native_build.load_native()
    return Path(loaded._name) if loaded is not None else pytest.skip("no C++ compiler here")


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path))


@pytest.fixture
def calls(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Notes who calls the compiler, which takes half a second instead of half a minute: it copies the library."""
    compiler, calls = tmp_path / "compiler", tmp_path / "calls"
    linked = f'for last; do :; done; case "$1" in -shared) cp {library} "$last";; *) : > "$last";; esac'
    compiler.write_text(f"#!/bin/sh\necho $PPID >> {calls}\nsleep 0.5\n{linked}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return calls


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert native_build.load_native.__wrapped__() is None
    assert "no C++ compiler" in caplog.text and "torch path" in caplog.text


def test_a_broken_compiler_is_a_reason_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    assert native_build.load_native.__wrapped__() is None
    assert "/bin/false" in caplog.text


def test_apples_compiler_is_asked_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, calls = tmp_path / "compiler", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {calls}\ncase "$1" in -shared) exit 1;; esac\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.delenv("DIPTYCH_MARCH", raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(native_build.platform, "machine", lambda: "arm64")
    assert native_build.load_native.__wrapped__() is None
    compiled, linked, *_ = calls.read_text().splitlines()
    assert compiled.startswith("-mcpu=native ") and "-Xpreprocessor -fopenmp" in compiled
    assert linked.startswith("-shared -undefined dynamic_lookup")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["clang", "one without OpenMP"])
def test_other_compilers_serve_as_well(tmp_path: Path, repository: Path, kind: str) -> None:
    name = "clang++" if kind == "clang" else "c++"
    compiler = shutil.which(name) or pytest.skip(f"no {name} here")
    if kind != "clang":
        script = tmp_path / "compiler"
        script.write_text(f'#!/bin/sh\ncase " $* " in *" -fopenmp "*) exit 1;; esac\nexec {compiler} "$@"\n')
        script.chmod(0o755)
        compiler = str(script)
    tests = [f"tests/kernels/{name}.py" for name in ("test_attention", "test_linear", "cpu/test_program")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", *tests]
    env = {**os.environ, "CXX": compiler, "DIPTYCH_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=repository, env=env, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert len(list((tmp_path / "cache" / "native").glob("*.so"))) == 1


@pytest.mark.slow
def test_the_library_is_built_once(tmp_path: Path, calls: Path) -> None:
    assert native_build.load_native.__wrapped__() is not None
    (built,) = (tmp_path / "native").iterdir()
    stamp, count = built.stat().st_mtime_ns, len(calls.read_text().split())
    assert native_build.load_native.__wrapped__() is not None
    assert built.stat().st_mtime_ns == stamp and len(calls.read_text().split()) == count > 0


@pytest.mark.slow
def test_a_damaged_library_is_built_again(tmp_path: Path, calls: Path) -> None:
    assert native_build.load_native.__wrapped__() is not None
    (built,) = (tmp_path / "native").iterdir()
    copy = built.with_suffix(".bad")
    copy.write_bytes(b"not a library")
    copy.replace(built)
    assert native_build.load_native.__wrapped__() is not None


@pytest.mark.slow
def test_processes_that_start_together_compile_once(calls: Path) -> None:
    started = [subprocess.Popen([sys.executable, "-P", "-c", LOADS]) for _ in range(2)]
    assert [process.wait(350) for process in started] == [0, 0]
    assert len(set(calls.read_text().split())) == 1, "both of them compiled"


@pytest.mark.slow
def test_a_killed_process_neither_blocks_the_next_nor_leaves_a_folder(tmp_path: Path, calls: Path) -> None:
    quick = os.environ["CXX"]
    (endless := tmp_path / "endless").write_text(f"#!/bin/sh\necho $$ >> {tmp_path / 'endless.pid'}\nexec sleep 300\n")
    endless.chmod(0o755)
    program = [
        sys.executable,
        "-P",
        "-c",
        "from kernels.cpu.build import load_native; assert load_native() is not None",
    ]
    first = subprocess.Popen(program, env={**os.environ, "CXX": str(endless)})
    wait_until(lambda: (tmp_path / "endless.pid").exists())
    second = subprocess.Popen(program, env={**os.environ, "CXX": quick}, stderr=subprocess.DEVNULL)
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(5)
    first.kill()
    first.wait(30)
    os.kill(int((tmp_path / "endless.pid").read_text()), signal.SIGKILL)
    assert second.wait(60) == 0 and calls.exists()
    assert [each.suffix for each in (tmp_path / "native").iterdir()] == [".so"], (
        "a folder of the killed process is left"
    )


def test_a_compiler_that_computes_is_awaited_and_one_that_hangs_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both run longer than a compiler may stall."""
    assert compiling.session_cpu_s(os.getsid(0)) > 0
    touched: list[None] = []
    seen = tmp_path / "seen"
    monkeypatch.setattr(compiling, "session_cpu_s", lambda leader: len(touched) + 1.0)
    ends = ["sh", "-c", f"while ! [ -e {seen} ]; do sleep 0.05; done"]
    compiling.run_compiler(ends, lambda: touched.append(seen.touch()), stall_s=0.01)
    with pytest.raises(subprocess.TimeoutExpired):
        compiling.run_compiler(["sleep", "300"], lambda: touched.append(None), timeout_s=0.1)
    monkeypatch.setattr(compiling, "session_cpu_s", lambda leader: 0.0)
    with pytest.raises(subprocess.TimeoutExpired):
        compiling.run_compiler(["sh", "-c", "sleep 300 & wait"], lambda: None, stall_s=0.1)


def test_a_process_waits_while_the_other_makes_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn comes only when the other one has not touched the folder for as long as a compiler may stall."""
    now = [0.0]
    folder = tmp_path / "native"
    folder.mkdir()
    touches = iter(range(5))

    def sleep(seconds: float) -> None:
        now[0] += 60.0
        if (stamp := next(touches, None)) is not None:
            os.utime(folder, (stamp, stamp))

    monkeypatch.setattr(native_build, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    with lock_held(folder), native_build._turn(folder):
        assert now[0] > 5 * 60.0 + native_build.STALL_S


def test_the_next_owner_of_the_lock_deletes_no_folder_of_a_process_that_compiles_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, found = [0.0], list[tuple[bool, bool, bool]]()
    (left := tmp_path / "native" / f"{native_build.LOCKED}x").mkdir(parents=True)

    def sleep(seconds: float) -> None:
        now[0] += 60.0

    def compile_here(compiler: str, kinds: object, scratch: Path, progress: object) -> Path:
        fcntl.flock(held, fcntl.LOCK_UN)
        with native_build._turn(tmp_path / "native") as is_locked:
            found.append((is_locked, scratch.is_dir(), left.is_dir()))
        raise OSError("compiles no longer")

    monkeypatch.setattr(native_build, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(native_build, "find_compiler", lambda: "c++")
    monkeypatch.setattr(native_build, "compile_here", compile_here)
    with lock_held(tmp_path / "native") as held, pytest.raises(OSError, match="no longer"):
        native_build._load(tmp_path / "native")
    assert found == [(True, True, False)]


@contextmanager
def lock_held(folder: Path) -> Iterator[int]:
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    yield held
    os.close(held)


@pytest.fixture
def shipped(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel's folder with a library for each kind of CPU, all of them this machine's, and no compiler."""
    folder = tmp_path / "built"
    folder.mkdir()
    for each in of_machine(platform.machine()):
        (folder / f"{each.name}.so").write_bytes(library.read_bytes())
    monkeypatch.setattr(native_build, "SHIPPED", folder)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("DIPTYCH_MARCH", raising=False)
    return folder


def test_a_wheel_s_library_is_chosen_and_nothing_is_compiled(shipped: Path, tmp_path: Path) -> None:
    best, *_ = that_run(platform.machine(), features_here()) or pytest.skip("a CPU for which no wheel has a library")
    loaded = native_build.load_native.__wrapped__()
    assert loaded is not None and loaded._name == str(shipped / f"{best.name}.so")
    assert not (tmp_path / "native").exists()


def test_a_library_that_does_not_load_makes_room_for_the_next(
    shipped: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    best, second, *_ = of_machine(platform.machine())
    monkeypatch.setattr(native_build, "features_here", lambda: best.needs | second.needs)
    damaged = shipped / "damaged"
    damaged.write_bytes(b"not a library")
    damaged.replace(shipped / f"{best.name}.so")
    loaded = native_build.load_native.__wrapped__()
    assert loaded is not None and loaded._name == str(shipped / f"{second.name}.so")
    assert "trying the next" in caplog.text


@pytest.mark.slow
def test_a_cpu_that_no_library_fits_compiles(
    shipped: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # of the compiler, a script
    monkeypatch.setattr(native_build, "features_here", frozenset)
    assert native_build.load_native.__wrapped__() is not None
    assert calls.exists() and "compiling them for it" in caplog.text


@pytest.mark.slow
def test_a_kind_that_is_named_is_compiled(shipped: Path, calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("DIPTYCH_MARCH", "x86-64-v3")
    assert native_build.load_native.__wrapped__() is not None
    assert calls.exists()
