from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from common.config import DecodeWorkerConfig
from common.engine.vllm.environment import (
    CONSTANTS,
    RankResources,
    find_libraries,
    thread_binding,
    variables,
    visible_gpus,
)


@pytest.mark.parametrize(
    ("num_ranks", "num_threads", "binding"),
    [(1, 0, "2,3,6,7"), (1, 2, "2,3"), (2, 0, "2,6|3,7"), (4, 0, "2|3|6|7"), (8, 0, "2|3|6|7|2|3|6|7")],
)
def test_ranks_divide_the_cores(num_ranks: int, num_threads: int, binding: str) -> None:
    assert thread_binding([2, 3, 6, 7], num_ranks, num_threads) == binding


@pytest.mark.parametrize(
    ("visible", "first", "count", "expected"),
    [
        ("", 0, 8, ""),
        ("4,5,6,7", 0, 2, ""),
        ("", 2, 1, "2"),
        ("", 4, 4, "4,5,6,7"),
        ("4,5,6,7", 2, 2, "6,7"),
        ("GPU-a, GPU-b", 1, 1, "GPU-b"),
    ],
)
def test_a_worker_sees_its_gpus(visible: str, first: int, count: int, expected: str) -> None:
    assert visible_gpus(visible, first, count) == expected


def test_a_gpu_worker_needs_no_cores_or_libraries() -> None:
    config = DecodeWorkerConfig(engine="vllm", device="cuda:2", tensor_parallel_size=2)
    assert variables(RankResources.of(config), {}, [0, 1], {}) == ({**CONSTANTS, "CUDA_VISIBLE_DEVICES": "2,3"}, [])


def test_a_worker_on_several_hosts_uses_the_gpus_of_each() -> None:
    config = DecodeWorkerConfig(engine="vllm", device="cuda:4", tensor_parallel_size=8, rank_hosts=2, rank_port=7005)
    assert variables(RankResources.of(config), {}, [0], {})[0]["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_a_cpu_worker_preloads_what_is_found_and_names_what_is_not() -> None:
    config, libraries = DecodeWorkerConfig(engine="vllm", device="cpu"), {"libtcmalloc": Path("/lib/libtcmalloc.so.4")}
    wanted, missing = variables(RankResources.of(config), {"LD_PRELOAD": "/mine.so"}, [0, 1], libraries)
    assert wanted == {
        **CONSTANTS,
        "VLLM_CPU_OMP_THREADS_BIND": "0,1",
        "LD_PRELOAD": "/lib/libtcmalloc.so.4:/mine.so",
    }
    assert missing == ["libiomp5"]


def test_fewer_threads_than_cores_are_not_bound_unless_the_cores_are_chosen() -> None:
    config = DecodeWorkerConfig(engine="vllm", device="cpu", threads=4, tensor_parallel_size=2)
    wanted, _ = variables(RankResources.of(config), CONSTANTS, range(8), {})
    assert wanted == {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "2"}
    wanted, _ = variables(RankResources.of(replace(config, cores="0-7")), CONSTANTS, range(8), {})
    assert wanted == {"VLLM_CPU_OMP_THREADS_BIND": "0,2|1,3"}


def test_variables_of_the_user_are_kept() -> None:
    environ = {
        **dict.fromkeys(CONSTANTS, "0"),
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "LD_PRELOAD": "/a/libtcmalloc.so:/b/libiomp5.so",
    }
    config = DecodeWorkerConfig(engine="vllm", device="cpu")
    assert variables(RankResources.of(config), environ, [0, 1], {}) == ({}, [])


def test_the_first_folder_with_a_library_wins(tmp_path: Path) -> None:
    for name in ("a/libtcmalloc.so.4", "a/libtcmalloc_minimal.so.4", "b/libtcmalloc.so", "b/libiomp5.so"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = find_libraries([tmp_path / "missing", tmp_path / "a", tmp_path / "b"])
    assert found == {
        "libtcmalloc": tmp_path / "a" / "libtcmalloc_minimal.so.4",
        "libiomp5": tmp_path / "b" / "libiomp5.so",
    }
