"""Environment variables of vLLM's processes: GPUs, cores, and the libraries that it preloads on a CPU.

They must be set before vLLM is imported, and its processes inherit them. Variables that are already set are kept.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from common.config import WorkerConfig

log = logging.getLogger(__name__)
GPUS = "CUDA_VISIBLE_DEVICES"
"""Also read by vLLM on ROCm."""
THREADS = "VLLM_CPU_OMP_THREADS_BIND"
PRELOAD = "LD_PRELOAD"
CONSTANTS = {
    # Hide torch's warnings, and the resource tracker's about shared memory of killed processes.
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore:resource_tracker:UserWarning",
    "VLLM_NO_USAGE_STATS": "1",  # Diptych sends no usage statistics
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would inherit the locks of our threads
}
LIBRARIES: Mapping[str, tuple[str, str]] = {
    "libtcmalloc": ("libtcmalloc*.so*", "the system package libtcmalloc-minimal4 or gperftools-libs"),
    "libiomp5": ("libiomp5.so", "the Python package intel-openmp"),
}
"""Libraries that vLLM preloads on a CPU, with their files and the package that contains them."""


@dataclass(frozen=True, slots=True)
class RankResources:
    """Ranks of a worker on one host, and what they may use there.

    They use GPUs from index `first_gpu` on, or `num_threads` threads on the CPU (0 for one per core). Threads are bound
    to cores if there is one for each, or if `owns_cores`.
    """

    on_gpu: bool
    num_ranks: int
    first_gpu: int = 0
    num_threads: int = 0
    owns_cores: bool = False

    @classmethod
    def of(cls, config: WorkerConfig) -> RankResources:
        """Return those of the host of a worker process."""
        return cls(config.on_gpu, config.ranks_per_host, config.device_index, config.threads, bool(config.cores))


def prepare_environment(config: WorkerConfig) -> None:
    """Set the variables for a worker with `--engine vllm` and log missing libraries."""
    prepare_variables(RankResources.of(config))


def prepare_variables(ranks: RankResources) -> None:
    """Set the variables for the ranks of this host and log missing libraries."""
    wanted, missing = variables(ranks, os.environ, sorted(os.sched_getaffinity(0)), find_libraries(library_folders()))
    os.environ.update(wanted)
    for name in missing if platform.machine() == "x86_64" else [name for name in missing if name != "libiomp5"]:
        log.warning("vLLM runs without %s, which makes its steps slower: install %s", name, LIBRARIES[name][1])


def variables(
    ranks: RankResources, environ: Mapping[str, str], cores: Sequence[int], libraries: Mapping[str, Path]
) -> tuple[dict[str, str], list[str]]:
    """Return the variables to set, and the names in LIBRARIES of those that are neither found nor preloaded.

    `cores` are the CPUs that this process may use, `libraries` the files of the names in LIBRARIES.
    """
    wanted = {name: value for name, value in CONSTANTS.items() if name not in environ}
    if ranks.on_gpu:
        if shown := visible_gpus(environ.get(GPUS, ""), ranks.first_gpu, ranks.num_ranks):
            wanted[GPUS] = shown
        return wanted, []
    wanted |= thread_variables(ranks, cores)
    preloaded = environ.get(PRELOAD, "")
    absent = [name for name in LIBRARIES if name not in preloaded]
    if found := [str(libraries[name]) for name in absent if name in libraries]:
        wanted[PRELOAD] = ":".join([*found, *filter(None, [preloaded])])
    kept = {name: value for name, value in wanted.items() if name == PRELOAD or name not in environ}
    return kept, [name for name in absent if name not in libraries]


def thread_variables(ranks: RankResources, cores: Sequence[int]) -> dict[str, str]:
    """Return the variables that determine the threads of ranks on a CPU."""
    if ranks.owns_cores or not 0 < ranks.num_threads < len(cores):
        return {THREADS: thread_binding(cores, ranks.num_ranks, ranks.num_threads)}
    # Other processes may use any of the cores, so the threads are not bound.
    return {THREADS: "nobind", "OMP_NUM_THREADS": str(max(1, ranks.num_threads // ranks.num_ranks))}


def visible_gpus(visible: str, first: int, count: int) -> str:
    """Return the GPUs of a worker as a list: `count` from index `first` of `visible`; "" if these are vLLM's default.

    `visible` is the list that this process may use, "" for all.
    """
    if not first:
        return ""
    names = [one.strip() for one in visible.split(",") if one.strip()]
    return ",".join(names[first : first + count] if names else map(str, range(first, first + count)))


def thread_binding(cores: Sequence[int], num_ranks: int, num_threads: int = 0) -> str:
    """Return the cores of each rank, such as "0,1|2,3". Ranks share cores if there are fewer cores than ranks.

    `num_threads` limits the number of cores of the worker; 0 for no limit.
    """
    usable = list(cores)[: num_threads or len(cores)]
    return "|".join(
        ",".join(map(str, usable[rank::num_ranks] or [usable[rank % len(usable)]])) for rank in range(num_ranks)
    )


def library_folders() -> Iterator[Path]:
    """Iterate over folders that may contain the libraries: those of vLLM, of this environment and of the system."""
    if (spec := find_spec("vllm")) is not None:
        yield from (Path(place) / "libs" for place in spec.submodule_search_locations or ())
    yield Path(sys.prefix) / "lib"
    for root in ("/usr/local/lib", "/usr/lib", "/usr/lib64"):
        yield Path(root)
        yield from sorted(Path(root).glob("*-linux-gnu"))


def find_libraries(folders: Iterable[Path]) -> dict[str, Path]:
    """Return the first file of each name in LIBRARIES."""
    found: dict[str, Path] = {}
    for folder in folders:
        for name, (pattern, _) in LIBRARIES.items():
            if name not in found and (files := sorted(folder.glob(pattern))):
                found[name] = next((file for file in files if "minimal" in file.name), files[0])
    return found
