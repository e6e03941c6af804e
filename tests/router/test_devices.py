"""Which GPUs the workers of `diptych serve` get. Pure: no GPU is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from router.local.devices import count_gpus
from router.local.processes import ServePlan, read_plan

NOTHING = Path("/nonexistent")
RANKS = ("--device", "cuda", "--kv-memory-gib", "4")


def plan_of(*argv: str, num_gpus: int) -> ServePlan:
    return read_plan(argv, {}, num_cores=8, num_gpus=num_gpus)


def devices(plan: ServePlan) -> list[str]:
    return [worker.device for worker in (*plan.prefill, *plan.decode)]


def shares(plan: ServePlan) -> list[float]:
    return [worker.gpu_memory_utilization for worker in (*plan.prefill, *plan.decode)]


def test_each_worker_gets_a_gpu_of_its_own() -> None:
    plan = plan_of("--device", "cuda", "--prefill", "2", "--decode", "2", num_gpus=5)
    assert devices(plan) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert shares(plan) == [0.9] * 4


def test_one_gpu_is_shared() -> None:
    plan = plan_of("--device", "cuda", "--prefill", "2", num_gpus=1)
    assert devices(plan) == ["cuda"] * 3
    assert shares(plan) == pytest.approx([0.3] * 3)


def test_what_the_driver_does_not_show_is_left_to_torch() -> None:
    assert devices(plan_of("--device", "cuda", num_gpus=0)) == ["cuda", "cuda"]


def test_too_few_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError) as refused:
        plan_of("--device", "cuda", "--prefill", "2", "--decode", "2", num_gpus=3)
    assert str(refused.value) == (
        "device='cuda' is refused: more GPUs: 4 workers need 4, and this machine has 3; start fewer workers, or name "
        "the GPUs that they are to share, as in --prefill-device cuda:0 --decode-device cuda:0"
    )
    with pytest.raises(ConfigError, match="2 workers need 2, and this machine has 2, of which other workers name 1;"):
        plan_of("--prefill-device", "cuda:1", "--decode-device", "cuda", "--decode", "2", num_gpus=2)


def test_workers_of_several_ranks_get_neighbours() -> None:
    """The larger ones choose first."""
    plan = plan_of(*RANKS, "--prefill", "2", "--decode", "1", "--decode-tensor-parallel-size", "2", num_gpus=4)
    assert devices(plan) == ["cuda:2", "cuda:3", "cuda:0"]
    pairs = plan_of(*RANKS, "--tensor-parallel-size", "2", "--prefill", "2", "--decode", "2", num_gpus=8)
    assert devices(pairs) == ["cuda:0", "cuda:2", "cuda:4", "cuda:6"]
    with pytest.raises(ConfigError, match="2 workers of 2 GPUs each need 4, and this machine has 3;"):
        plan_of(*RANKS, "--tensor-parallel-size", "2", num_gpus=3)
    with pytest.raises(ConfigError, match="2 workers of 2 GPUs each need 4, and this machine has 1;"):
        plan_of(*RANKS, "--tensor-parallel-size", "2", num_gpus=1)


def test_named_gpus_stay_and_the_rest_is_chosen() -> None:
    assert devices(plan_of("--prefill-device", "cuda:0", "--decode-device", "cuda", num_gpus=2)) == ["cuda:0", "cuda:1"]
    both = plan_of("--device", "cuda:1", "--decode", "2", num_gpus=2)
    assert devices(both) == ["cuda:1"] * 3
    assert shares(both) == pytest.approx([0.3] * 3)


def test_a_cpu_needs_none() -> None:
    assert devices(plan_of("--prefill", "3", num_gpus=0)) == ["cpu"] * 4


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,2, 5"}, 3),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, 1),  # the driver stops at the first that is none
        ({"HIP_VISIBLE_DEVICES": "3"}, 1),
        ({}, 0),
    ],
)
def test_the_environment_says_what_is_visible(environ: dict[str, str], count: int) -> None:
    assert count_gpus(environ, NOTHING, NOTHING) == count


def test_the_driver_says_what_is_there(tmp_path: Path) -> None:
    nvidia, amd = tmp_path / "gpus", tmp_path / "nodes"
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (nvidia / name).mkdir(parents=True)
    for number, gpu_id in enumerate(("0", "51234", "8123", "991")):
        (amd / str(number)).mkdir(parents=True)
        (amd / str(number) / "gpu_id").write_text(f"{gpu_id}\n")
    assert count_gpus({}, nvidia, NOTHING) == 2
    assert count_gpus({}, NOTHING, amd) == 3
