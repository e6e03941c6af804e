"""Which GPUs the workers of `diptych serve` get. Pure: no GPU is needed."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from router.cli.serve.processes import ServePlan, read_plan

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
        "invalid device='cuda': must be cuda:N or cpu, because 4 workers need 4 GPUs and this machine has 3; start "
        "fewer workers, or share GPUs with --prefill-device cuda:0 --decode-device cuda:0"
    )
    with pytest.raises(ConfigError, match="2 workers need 2 GPUs and this machine has 2, and other workers use 1;"):
        plan_of("--prefill-device", "cuda:1", "--decode-device", "cuda", "--decode", "2", num_gpus=2)


@pytest.mark.slow
def test_workers_of_several_ranks_get_neighbours() -> None:
    """The larger ones choose first."""
    plan = plan_of(*RANKS, "--prefill", "2", "--decode", "1", "--decode-tensor-parallel-size", "2", num_gpus=4)
    assert devices(plan) == ["cuda:2", "cuda:3", "cuda:0"]
    pairs = plan_of(*RANKS, "--tensor-parallel-size", "2", "--prefill", "2", "--decode", "2", num_gpus=8)
    assert devices(pairs) == ["cuda:0", "cuda:2", "cuda:4", "cuda:6"]
    with pytest.raises(ConfigError, match="2 workers with 2 GPUs each need 4 GPUs and this machine has 3;"):
        plan_of(*RANKS, "--tensor-parallel-size", "2", num_gpus=3)
    with pytest.raises(ConfigError, match="2 workers with 2 GPUs each need 4 GPUs and this machine has 1;"):
        plan_of(*RANKS, "--tensor-parallel-size", "2", num_gpus=1)


def test_named_gpus_stay_and_the_rest_is_chosen() -> None:
    assert devices(plan_of("--prefill-device", "cuda:0", "--decode-device", "cuda", num_gpus=2)) == ["cuda:0", "cuda:1"]
    both = plan_of("--device", "cuda:1", "--decode", "2", num_gpus=2)
    assert devices(both) == ["cuda:1"] * 3
    assert shares(both) == pytest.approx([0.3] * 3)


def test_a_cpu_needs_none() -> None:
    plan = plan_of("--device", "cpu", "--prefill", "3", num_gpus=4)
    assert devices(plan) == ["cpu"] * 4 and plan.placement == ""


def test_gpus_are_found_and_divided() -> None:
    """Each worker has its own GPU where there are enough. Else they share them evenly, instead of a refusal."""
    apart = plan_of("--prefill", "2", "--decode", "2", num_gpus=4)
    assert devices(apart) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"] and shares(apart) == [0.9] * 4
    assert apart.placement == "--device auto: a GPU"
    shared = plan_of("--prefill", "2", "--decode", "2", num_gpus=3)
    assert devices(shared) == ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]
    assert shares(shared) == pytest.approx([0.45, 0.9, 0.9, 0.45])
    one = plan_of(num_gpus=1)
    assert devices(one) == ["cuda", "cuda"] and shares(one) == pytest.approx([0.45] * 2)
    assert one.router.local_prefill_threshold == 0


def test_named_gpus_are_taken_last() -> None:
    assert devices(plan_of("--prefill-device", "cuda:0", "--decode", "2", num_gpus=2)) == ["cuda:0", "cuda:1", "cuda:0"]


def test_ranks_share_gpus_too_but_not_their_own() -> None:
    shared = plan_of("--kv-memory-gib", "4", "--tensor-parallel-size", "2", "--decode", "2", num_gpus=3)
    assert devices(shared) == ["cuda:0", "cuda:1", "cuda:0"]
    alone = plan_of("--tensor-parallel-size", "4", num_gpus=3)
    assert devices(alone) == ["cpu", "cpu"]
    assert alone.placement == "--device auto: the CPU, because its ranks need 4 GPUs, but this machine has 3"


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ((), "no GPU"),
        (("--prefill-device", "cpu"), "the other pool is on the CPU"),
        (("--kv-cache-dtype", "int8"), "invalid kv_cache_dtype='int8': must be auto, native or fp8 on cuda"),
        (("--decode-quantization", "int4"), "invalid quantization='int4': must be auto or none on cuda"),
    ],
)
def test_both_pools_are_on_the_cpu_and_the_plan_says_why(argv: tuple[str, ...], reason: str) -> None:
    plan = plan_of(*argv, num_gpus=2 if argv else 0)
    assert devices(plan) == ["cpu", "cpu"] and plan.router.local_prefill_threshold > 0
    assert plan.placement == f"--device auto: the CPU, because {reason}"


def test_a_setting_for_gpus_alone_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="0 on a CPU; .*; --device auto: the CPU, because no GPU"):
        plan_of("--kv-host-gib", "1", num_gpus=0)


def vllm_plan(*argv: str, num_gpus: int = 0) -> ServePlan:
    return plan_of("--engine", "vllm", *argv, num_gpus=num_gpus)


@pytest.mark.parametrize(
    ("argv", "cores"),
    [
        (["--device", "cpu"], ["0,1,2,3", "4,5,6,7"]),
        (["--device", "cpu", "--decode", "2"], ["0,1", "2,3,4", "5,6,7"]),
        (["--device", "cpu", "--prefill-cores", "0"], ["0", "0,1,2,3,4,5,6,7"]),
        (["--device", "cpu", "--prefill", "5", "--decode", "5"], ["0", "0", "1", "2", "3", "4", "4", "5", "6", "7"]),
        (["--device", "cuda"], ["", ""]),
    ],
)
def test_workers_of_vllm_have_cores_of_their_own(argv: list[str], cores: list[str]) -> None:
    plan = vllm_plan(*argv)
    found = [worker.cores for worker in (*plan.prefill, *plan.decode)]
    assert found == cores or sorted(set("".join(found))) == list("01234567") and len(found) == len(cores) == 10


def test_arguments_of_vllm_reach_both_pools_or_one() -> None:
    plan = vllm_plan("--decode-engine-args=--enforce-eager", "--device", "cpu", "--", "--seed", "1")
    assert plan.prefill[0].engine_args == ("--seed", "1")
    assert plan.decode[0].engine_args == ("--seed", "1", "--enforce-eager")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["--decode-engine=diptych"],
            "invalid --prefill-engine vllm: must be diptych, the engine of the decode workers",
        ),
        (
            ["--autoscale", "--device=cpu"],
            "invalid --autoscale|autoscale=True: must be omitted with --engine vllm on a CPU",
        ),
        (["--device=cuda", "--", "-pp", "2"], "-pp is not supported by diptych serve"),
        (["--decode-watermark=0.1"], "invalid --decode-watermark 0.1: must be omitted with --engine vllm"),
        (["--", "--model", "x"], "--model is not accepted for vLLM. Use --model before the --"),
    ],
)
def test_plans_that_vllm_cannot_follow_are_refused(argv: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        vllm_plan(*argv)


def test_pools_with_different_engines_are_accepted_without_prefill_workers() -> None:
    assert vllm_plan("--prefill", "0", "--prefill-engine=diptych", "--device=cpu").decode[0].engine == "vllm"
