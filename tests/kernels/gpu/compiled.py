"""Compiles Triton kernels for chips that are not there, and reads what the assembler made of them.

Compiling needs a process whose Triton does not interpret: `compile_kernels` starts one or two, which run this file with
jobs on their standard input. Registers, spills and shared memory are those of the cubin, by tools of Triton.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.gpu.tiles.chip import HOPPER, KIB, Chip

ROOT = Path(__file__).resolve().parents[3]
PROCESSES = 2
WORTH_A_PROCESS = 3
"""Kernels that take as long as a process to start."""
MULTIPROCESSOR_REGISTERS = 64 * 1024
Target = int | str
"""NVIDIA's compute capability, 90 for 9.0, or AMD's chip."""
CHIPS: dict[Target, Chip] = {
    80: Chip("nvidia", (8, 0), 163 * KIB),
    86: Chip("nvidia", (8, 6), 99 * KIB),
    89: Chip("nvidia", (8, 9), 99 * KIB),
    90: HOPPER,
    100: Chip("nvidia", (10, 0), 227 * KIB),
    120: Chip("nvidia", (12, 0), 99 * KIB),
    "gfx942": Chip("amd", (9, 4), 64 * KIB),
}
"""An A100, A10, L4 or L40S, H100, B200, an RTX of Blackwell, an MI300X."""


@dataclass(frozen=True)
class Job:
    """kernel: "package.module:name". signature: each parameter's type in order ("*bf16", "i32", "fp32"), but for the
    constexprs. aligned: integers known to be multiples of 16, as pointers are taken to be."""

    kernel: str
    signature: dict[str, str]
    constexprs: dict[str, Any]
    capability: Target = 90
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ()
    enable_fp_fusion: bool = False


@dataclass(frozen=True)
class Compiled:
    """spills: instructions that move registers to and from local memory; of AMD's chips the registers that are moved.

    sass: the machine's instructions. ptx: "" for AMD's chips.
    """

    ttir: str
    ptx: str
    sass: str
    registers: int
    spills: int
    shared_bytes: int


def compile_kernel(
    kernel: str,
    signature: dict[str, str],
    constexprs: dict[str, Any],
    capability: Target = 90,
    num_warps: int = 4,
    num_stages: int = 3,
    aligned: tuple[str, ...] = (),
) -> Compiled:
    return compile_kernels([Job(kernel, signature, constexprs, capability, num_warps, num_stages, aligned)])[0]


def compile_kernels(jobs: list[Job]) -> list[Compiled]:
    """In the order of the jobs. RuntimeError with the compiler's words if one does not compile."""
    count = PROCESSES if len(jobs) > PROCESSES * WORTH_A_PROCESS else 1
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(_compile_apart, [jobs[i::count] for i in range(count)]))
    return [found[i % count][i // count] for i in range(len(jobs))]


def _compile_apart(jobs: list[Job]) -> list[Compiled]:
    """In a process of their own, with an empty cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "compiled.json")
        ended = subprocess.run(
            [sys.executable, "-P", __file__, str(output)],
            input=json.dumps([asdict(job) for job in jobs]),
            stderr=subprocess.PIPE,
            text=True,
            env=environment | {"TRITON_CACHE_DIR": folder},
            cwd=ROOT,
        )
        if ended.returncode:
            raise RuntimeError(ended.stderr)
        return [Compiled(**found) for found in json.loads(output.read_text(encoding="utf-8"))]


def _compile(job: dict[str, Any]) -> Compiled:
    """In the process that compiles."""
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, name = job["kernel"].partition(":")
    function = getattr(importlib.import_module(module), name)
    constexprs = job["constexprs"]
    types = {name: "constexpr" if name in constexprs else job["signature"][name] for name in function.arg_names}
    aligned = [n for n, type_ in types.items() if type_.startswith("*") or n in job["aligned"]]
    attributes = {(function.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(function, types, {(function.arg_names.index(n),): v for n, v in constexprs.items()}, attributes)
    chip = job["capability"]
    target = GPUTarget("hip", chip, 64) if isinstance(chip, str) else GPUTarget("cuda", chip, 32)
    options = {name: job[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    kernel = triton.compile(source, target=target, options=options)
    sass, registers, spills = _noted(kernel.asm["amdgcn"]) if "amdgcn" in kernel.asm else _inspect(kernel.asm["cubin"])
    return Compiled(kernel.asm["ttir"], kernel.asm.get("ptx", ""), sass, registers, spills, kernel.metadata.shared)


def _noted(amdgcn: str) -> tuple[str, int, int]:
    """The assembly of an AMD chip, registers a thread and spilled registers, by its notes."""
    import re

    counts = [re.search(rf"\.vgpr_{name}:\s*(\d+)", amdgcn) for name in ("count", "spill_count")]
    registers, spills = (int(count[1]) for count in counts if count is not None)
    return amdgcn, registers, spills


def _inspect(cubin: bytes) -> tuple[str, int, int]:
    """SASS, registers a thread, spill instructions."""
    import re

    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = subprocess.check_output([knobs.nvidia.nvdisasm.path, "-c", file.name], text=True)
        usage = subprocess.check_output([knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name], text=True)
    registers = re.search(r"\bREG:(\d+)", usage)
    assert registers is not None, usage
    return sass, int(registers[1]), len(re.findall(r"\b(?:STL|LDL)\b", sass))


if __name__ == "__main__":
    found = [asdict(_compile(job)) for job in json.load(sys.stdin)]
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
