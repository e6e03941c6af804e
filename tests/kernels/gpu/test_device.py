"""Which GPUs the kernels run on, over a pretended torch, and what a machine lacks."""

from __future__ import annotations

import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels.agreement.gate import Finding
from kernels.device import LEAST_TRITON, missing_to_launch, too_large, usable_gpus
from kernels.gpu.tiles.chip import HOPPER, KIB, Chip, chip_of

GPU = torch.device("cuda:0")


def gpu(major: int, minor: int, name: str = "a GPU", arch: str = "", **memory: int) -> SimpleNamespace:
    return SimpleNamespace(major=major, minor=minor, name=name, gcnArchName=arch, **memory)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes torch one of CUDA or ROCm that sees these GPUs, on a machine that lacks nothing."""

    def these(found: Sequence[SimpleNamespace], *, hip: str | None = None) -> None:
        monkeypatch.setattr(torch.version, "cuda", None if hip else "13.0")
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda place: found[torch.device("cuda", place).index] if isinstance(place, int) else found[0],
        )
        monkeypatch.setattr("kernels.device.missing_to_launch", lambda: "")
        chip_of.cache_clear()

    yield these
    chip_of.cache_clear()


def test_supported_gpus_are_counted(pretend: Callable[..., None]) -> None:
    pretend([gpu(9, 0), gpu(8, 9)])
    assert usable_gpus() == (2, "")
    pretend([gpu(9, 0), gpu(7, 5)])
    assert usable_gpus() == (1, "")
    pretend([gpu(7, 5, "Tesla T4")])
    assert usable_gpus() == (0, "the kernels need compute capability 8.0, but Tesla T4 has 7.5")
    pretend([])
    assert usable_gpus() == (0, "torch finds no GPU")


def test_amd_is_known_by_its_chip(pretend: Callable[..., None]) -> None:
    """A workstation's GPU of AMD has a higher number than an MI300X, and no matrix cores that the kernels use."""
    pretend([gpu(9, 4, "MI300X", "gfx942:sramecc+:xnack-")], hip="7.0")
    assert usable_gpus() == (1, "")
    pretend([gpu(11, 0, "Radeon", "gfx1100")], hip="7.0")
    assert usable_gpus() == (0, "the kernels support gfx90a, gfx942, gfx950, but Radeon is gfx1100")


def test_an_old_driver_is_a_reason(pretend: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend([gpu(9, 0)])

    def init() -> None:
        warnings.warn("CUDA initialization: the driver is too old", stacklevel=1)
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update.")

    monkeypatch.setattr(torch.cuda, "init", init)
    found = "torch finds no GPU (The NVIDIA driver on your system is too old (found version 11040))"
    assert usable_gpus() == (0, found)


def test_what_the_kernels_lack_is_a_reason(pretend: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend([gpu(9, 0)])
    monkeypatch.setattr("kernels.device.missing_to_launch", lambda: "a C compiler")
    assert usable_gpus() == (0, "the GPU's kernels need a C compiler")


@pytest.mark.parametrize(
    ("version", "missing"),
    [("3.4.0", True), ("2.3.1", True), ("3.5.0", False), ("3.10.0+rocm7", False), ("4.0.0", False)],
)
def test_an_old_triton_is_refused(monkeypatch: pytest.MonkeyPatch, version: str, missing: bool) -> None:
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    assert missing_to_launch() == (f"Triton 3.5 or newer ({version} is installed)" if missing else "")
    assert LEAST_TRITON == (3, 5)


def test_the_oldest_triton_is_that_of_the_packages(repository: Path) -> None:
    extras = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (bound,) = [one for one in extras["dev"] if one.startswith("triton")]
    assert bound.startswith(f"triton>={LEAST_TRITON[0]}.{LEAST_TRITON[1]},<")


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert missing_to_launch().startswith("Triton (")


def test_a_chip_is_read_from_the_device(pretend: Callable[..., None]) -> None:
    """The memory of one program: the most that may be requested, where torch reports it, not the default."""
    pretend([gpu(8, 9, shared_memory_per_block_optin=101_376, shared_memory_per_block=49_152)])
    assert chip_of(GPU) == Chip("nvidia", (8, 9), 99 * KIB) and chip_of(torch.device("cpu")) is HOPPER
    pretend([gpu(9, 4, arch="gfx942", shared_memory_per_block=65_536)], hip="7.0")
    mi300x = chip_of(GPU)
    assert mi300x == Chip("amd", (9, 4), 64 * KIB)
    assert not (mi300x.multiplies_by_warpgroup or mi300x.has_tma or mi300x.converts_e4m3)
    assert Chip("amd", (9, 5), 160 * KIB).converts_e4m3
    consumer = Chip("nvidia", (12, 0), 99 * KIB)
    assert consumer.has_tma and consumer.converts_e4m3 and not consumer.multiplies_by_warpgroup
    assert [Chip("nvidia", (10, minor), 227 * KIB).multiplies_by_warpgroup for minor in (0, 3)] == [True, True]


def test_a_kernel_that_is_too_large_is_a_sentence() -> None:
    from triton.runtime.errors import OutOfResources

    error = OutOfResources(102_400, 101_376, "shared memory")
    words = "a kernel needs 102,400 bytes of shared memory, but this GPU has 101,376"
    assert too_large(error) == words and too_large(ValueError("out of resource")) == ""
    assert Finding.of_failure("prefill attention", error).problem == words
