"""Instruction sets for which a wheel contains compiled kernels. Must not import project modules: used by setup.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True)
class InstructionSet:
    """One library: the compiler's flags for it, and what a CPU must have to run it, in the words of /proc/cpuinfo."""

    name: str
    machine: str
    flags: tuple[str, ...]
    needs: frozenset[str]


def _x86(name: str, level: str, needs: str, *extensions: str) -> InstructionSet:
    flags = (f"-march={level}", *(f"-m{extension}" for extension in extensions))
    return InstructionSet(name, "x86_64", flags, frozenset(needs.split()))


def _arm(name: str, level: str, needs: str) -> InstructionSet:
    return InstructionSet(name, "aarch64", (f"-march={level}",), frozenset(needs.split()))


_V3 = "avx2 fma f16c bmi1 bmi2 abm movbe"
_V4 = f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl"

INSTRUCTION_SETS: Final = (
    _x86(
        *("avx512-bf16", "x86-64-v4", f"{_V4} avx512_vnni avx512_bf16 avx512vbmi"),
        *("avx512vnni", "avx512bf16", "avx512vbmi"),
    ),
    _x86("avx512-vnni", "x86-64-v4", f"{_V4} avx512_vnni", "avx512vnni"),
    _x86("avx512", "x86-64-v4", _V4),
    _x86("avx2-vnni", "x86-64-v3", f"{_V3} avx_vnni", "avxvnni"),
    _x86("avx2", "x86-64-v3", _V3),
    _arm("neon-i8mm", "armv8.2-a+dotprod+i8mm", "asimd asimddp i8mm"),
    _arm("neon-dotprod", "armv8.2-a+dotprod", "asimd asimddp"),
    _arm("neon", "armv8-a", "asimd"),
)
"""Best first for each machine. For CPUs that support none of them, kernels are compiled locally if possible."""


def of_machine(machine: str) -> tuple[InstructionSet, ...]:
    """Those of one kind of machine, as `platform.machine()` names it; none of others."""
    return tuple(each for each in INSTRUCTION_SETS if each.machine == machine)


def that_run(machine: str, features: frozenset[str]) -> tuple[InstructionSet, ...]:
    """Those that a CPU with these features runs, the best first."""
    return tuple(each for each in of_machine(machine) if each.needs <= features)


def chosen(names: str, machine: str) -> tuple[InstructionSet, ...]:
    """The sets that a build compiles: "all" of a machine, or names between commas. Raises ValueError."""
    known = {each.name: each for each in of_machine(machine)}
    if names == "all" and known:
        return tuple(known.values())
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"DIPTYCH_KERNELS: no {unknown[0]!r} for {machine}: all, or names of {_listed(known)}")
    return tuple(known[name] for name in wanted)


def _listed(names: dict[str, InstructionSet]) -> str:
    return ", ".join(names) if names else "none: kernels are compiled where they run"


def features_of(cpuinfo: str) -> frozenset[str]:
    """What every core has, from the text of /proc/cpuinfo."""
    lines = [line for line in cpuinfo.splitlines() if line.startswith(("flags", "Features"))]
    return frozenset.intersection(*(_words(line) for line in lines)) if lines else frozenset()


def _words(line: str) -> frozenset[str]:
    return frozenset(line.partition(":")[2].split())


def features_here(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What this machine's cores have; nothing where that cannot be read."""
    try:
        return features_of(path.read_text("utf-8"))
    except OSError:
        return frozenset()


def names_of(sets: Sequence[InstructionSet]) -> str:
    """For messages."""
    return ", ".join(each.name for each in sets)
