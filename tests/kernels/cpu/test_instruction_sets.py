"""Which library of a wheel a CPU gets: what it runs, and the best of that."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.cpu.instruction_sets import InstructionSet, chosen, features_of, of_machine, that_run

HASWELL = "sse4_2 abm bmi1 bmi2 avx avx2 f16c fma movbe"
SKYLAKE = f"{HASWELL} avx512f avx512bw avx512cd avx512dq avx512vl"
ICE_LAKE = f"{SKYLAKE} avx512_vnni avx512vbmi"
CPUS = {
    "Nehalem": ("x86_64", "sse4_2", ""),
    "Haswell": ("x86_64", HASWELL, "avx2"),
    "Alder Lake": ("x86_64", f"{HASWELL} avx_vnni", "avx2-vnni"),
    "Skylake-SP": ("x86_64", SKYLAKE, "avx512"),
    "Knights Landing": ("x86_64", f"{HASWELL} avx512f avx512cd", "avx2"),
    "Cascade Lake": ("x86_64", f"{SKYLAKE} avx512_vnni", "avx512-vnni"),
    "Ice Lake": ("x86_64", ICE_LAKE, "avx512-vnni"),
    "Zen 4": ("x86_64", f"{ICE_LAKE} avx512_bf16", "avx512-bf16"),
    "Sapphire Rapids": ("x86_64", f"{ICE_LAKE} avx512_bf16 avx_vnni amx_bf16", "avx512-bf16"),
    "Cortex-A72": ("aarch64", "fp asimd crc32", "neon"),
    "Graviton2": ("aarch64", "fp asimd asimdhp asimddp", "neon-dotprod"),
    "Graviton3": ("aarch64", "fp asimd asimddp i8mm bf16 sve", "neon-i8mm"),
    "POWER9": ("ppc64le", "", ""),
}
# What a compiler defines when it may use instructions, in the words of /proc/cpuinfo.
MACROS = {
    "__ABM__": "abm", "__LZCNT__": "abm", "__BMI__": "bmi1", "__FMA__": "fma", "__F16C__": "f16c",
    "__AVX512VNNI__": "avx512_vnni", "__AVX512BF16__": "avx512_bf16", "__AVXVNNI__": "avx_vnni",
    "__ARM_FEATURE_DOTPROD": "asimddp", "__ARM_FEATURE_MATMUL_INT8": "i8mm",
}  # fmt: skip
OF_EVERY_X86 = {"avx"}
"""What each set's least level has beyond what Linux lists for any machine; a CPU with AVX2 has it."""


@pytest.mark.parametrize("cpu", CPUS)
def test_a_cpu_gets_the_best_that_it_runs(cpu: str) -> None:
    machine, features, best = CPUS[cpu]
    assert [each.name for each in that_run(machine, frozenset(features.split()))][:1] == ([best] if best else [])


def test_what_one_core_lacks_is_not_used() -> None:
    text = f"processor : 0\nflags\t\t: {ICE_LAKE}\nbugs : x\n\nprocessor : 1\nflags\t\t: {HASWELL}\n"
    assert features_of(text) == set(HASWELL.split())
    assert features_of("Features\t: fp asimd\n") == {"fp", "asimd"}
    assert features_of("") == frozenset()


def test_a_build_names_what_it_brings() -> None:
    assert chosen("all", "x86_64") == of_machine("x86_64")
    assert [each.name for each in chosen("avx512, avx2", "x86_64")] == ["avx512", "avx2"]
    with pytest.raises(ValueError, match="DIPTYCH_KERNELS: no 'neon' for x86_64: all, or names of avx512-bf16, "):
        chosen("avx2,neon", "x86_64")
    with pytest.raises(ValueError, match="none: kernels are compiled where they run"):
        chosen("all", "darwin")


def macros(each: InstructionSet, pattern: str) -> set[str]:
    """What the compiler defines for a set and not for the plainest CPU."""
    compiler = shutil.which("g++") or pytest.skip("no g++ here")

    def defined(*flags: str) -> set[str]:
        command = [compiler, *flags, "-dM", "-E", "-x", "c++", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return set(re.findall(rf"#define ({pattern})", done.stdout))

    return defined(*each.flags) - defined()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="asks a compiler of x86-64")
@pytest.mark.parametrize("each", of_machine("x86_64"), ids=lambda each: each.name)
def test_a_set_needs_whatever_its_compiler_may_use(each: InstructionSet) -> None:
    used = {MACROS.get(name, name.strip("_").lower()) for name in macros(each, r"__(?:AVX|BMI|FMA_|F16C|LZCNT)\w*__")}
    assert used and used - OF_EVERY_X86 <= each.needs


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="asks a compiler of x86-64")
def test_every_part_of_the_sources_is_in_some_library(repository: Path) -> None:
    """A new `#if` in the C++ for instructions that no set has would never be shipped."""
    sources = "".join(file.read_text() for file in (repository / "kernels" / "native").glob("*.h"))
    asked = set(re.findall(r"defined\((__(?:AVX|F16C|FMA)\w*)\)", sources))
    assert len(asked) >= 7
    shipped = set.union(*(macros(each, r"__\w+__") for each in of_machine("x86_64")))
    assert asked <= shipped
    arm = set(re.findall(r"defined\((__ARM_FEATURE\w*)\)", sources))
    assert {MACROS[name] for name in arm} <= frozenset.union(*(each.needs for each in of_machine("aarch64")))
