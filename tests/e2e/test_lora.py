"""LoRA adapters through both pools: each request gets the tokens of transformers over the merged weights of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from common.engine.adapters.bank import AdapterBank
from common.engine.adapters.slots import AdapterSlots
from common.engine.models.load import load_model
from common.model_files.resolve import resolve_model

from ..adapters import ATTENTION, make_adapter, merge
from ..common.engine.models.generation import transformers_model
from ..common.engine.models.test_lora import AdaptedPool
from ..common.engine.weights.formats.checkpoints import FORMATS, write_checkpoint
from ..rig import IS_OWN_ENGINE, MODEL, wait_until
from .conftest import Oracle

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.slow]

NUM_TOKENS = 70
LENGTHS = (20, 45, 70)
PATIENCE_S = 120.0
ROUTER_FLAGS = ("--local-prefill-threshold", "0")


@dataclass(frozen=True)
class Adapted:
    """Folders of adapters, and what each must answer: by "base", "a", "b" and "c"."""

    folders: Mapping[str, Path]
    oracles: Mapping[str, Oracle]

    def expected(self, name: str, prompts: Sequence[list[int]], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
        return [self.oracles[name].greedy(prompt, num_tokens) for prompt in prompts]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, tiny_oracle: Oracle) -> Adapted:
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("adapters")
    folders = {
        "a": make_adapter(root / "a", tiny_folder, seed=1, rank=4, use_rslora=True),
        "b": make_adapter(root / "b", tiny_folder, seed=2, rank=8, modules=ATTENTION, rank_pattern={"v_proj": 3}),
        "c": make_adapter(root / "c", tiny_folder, seed=3, rank=2, alpha_pattern={"mlp.down_proj": 7.0}),
    }
    merged = {name: merge(root / f"merged-{name}", tiny_folder, folder) for name, folder in folders.items()}
    oracles = {
        name: Oracle(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        for name, folder in merged.items()
    }
    return Adapted(folders, {"base": tiny_oracle, **oracles})


def ask_all(
    system: Any, names: Sequence[str], prompts: Sequence[list[int]], *, base: str = MODEL, **params: Any
) -> dict[str, Any]:
    """The prompts of all names at once."""
    with ThreadPoolExecutor(len(names)) as pool:
        asked = {
            name: pool.submit(
                system.generate,
                prompts,
                model=base if name == "base" else name,
                **{"max_tokens": NUM_TOKENS, **params},
            )
            for name in names
        }
        return {name: future.result() for name, future in asked.items()}


def post(system: Any, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{system.stack.url}/v1/{path}", json=body, timeout=PATIENCE_S, trust_env=False)


def load(system: Any, name: str, folder: Path, **body: Any) -> httpx.Response:
    return post(system, "load_lora_adapter", lora_name=name, lora_path=str(folder), **body)


@pytest.fixture
def lora_system(system_of: Any, adapted: Adapted) -> Callable[..., Any]:
    """A system whose workers begin with the adapter a; b was loaded while it served."""

    def start(prefill: int, decode: int, *more: str) -> Any:
        flags = ("--lora", f"a={adapted.folders['a']}", "--max-loras", "3", "--dtype", "float32", *more)
        system = system_of(prefill, decode, router_flags=ROUTER_FLAGS, worker_flags=flags)
        if not any(one["id"] == "b" for one in models(system)):
            answer = load(system, "b", adapted.folders["b"])
            assert (answer.status_code, answer.json()["num_workers"]) == (200, prefill + decode), answer.text
        return system

    return start


def models(system: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{system.stack.url}/v1/models", trust_env=False).json()["data"]
    return found


@pytest.mark.parametrize("flags", [(), ("--tensor-parallel-size", "2")], ids=["one rank", "two ranks"])
def test_base_and_adapters_mixed_with_prefix_hits_and_preemption(
    lora_system: Any, adapted: Adapted, random_prompts: Any, flags: tuple[str, ...]
) -> None:
    system = lora_system(1, 1, "--num-blocks", "56", "--max-num-seqs", "9", *flags)
    prompts = random_prompts(LENGTHS, vocab_size=256, seed=5)
    names = ("base", "a", "b")
    expected = {name: adapted.expected(name, prompts) for name in names}
    assert len({str(tokens) for tokens in expected.values()}) == 3, "the adapters change nothing"
    assert ask_all(system, names, prompts) == expected
    preempted, hits = system.metric("vllm:num_preemptions"), system.metric("vllm:prefix_cache_hits")
    assert ask_all(system, names, prompts) == expected
    if IS_OWN_ENGINE:  # vLLM's blocks are longer than these prompts
        assert preempted > 0 and system.metric("vllm:prefix_cache_hits") > hits
    shown = {one["id"]: one["parent"] for one in models(system)}
    assert shown == {MODEL: None, "a": MODEL, "b": MODEL}
    assert system.metric("diptych_lora_bytes") > 0


@pytest.fixture
def two_decode_workers(lora_system: Any) -> Any:
    return lora_system(1, 2)


def test_a_killed_decode_worker_costs_no_token_and_learns_again_what_is_loaded(
    two_decode_workers: Any, adapted: Adapted, random_prompts: Any
) -> None:
    system = two_decode_workers
    prompts = random_prompts((30, 30, 30, 30), vocab_size=256, seed=6)
    expected = {name: adapted.expected(name, prompts, 300) for name in ("base", "a", "b")}
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask_all, system, tuple(expected), prompts, max_tokens=300)
        wait_until(lambda: system.metric("vllm:num_requests_running", "decode") >= 6, "streams", PATIENCE_S)
        victim = system.stack.workers("decode")[0]
        victim.kill()
        assert answers.result() == expected
    system.stack.restart(victim)
    system.wait_for_workers()
    wait_until(lambda: 'lora_name="b"' in metrics_of(victim), "the worker loads b again", PATIENCE_S)


@pytest.mark.own_engine
def test_streams_of_adapters_are_handed_over(two_decode_workers: Any, adapted: Adapted, random_prompts: Any) -> None:
    system = two_decode_workers
    prompts = random_prompts((30, 30, 30, 30), vocab_size=256, seed=7)
    expected = {name: adapted.expected(name, prompts, 300) for name in ("base", "a", "b")}
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask_all, system, tuple(expected), prompts, max_tokens=300)
        wait_until(lambda: system.metric("vllm:num_requests_running", "decode") >= 6, "streams", PATIENCE_S)
        victim = system.stack.workers("decode")[1]
        victim.terminate()
        assert answers.result() == expected
    victim.wait(time.monotonic() + PATIENCE_S)
    done = [line for line in router_page(system).splitlines() if line.startswith("diptych_handovers_total")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in done if 'outcome="done"' in line) > 0
    system.stack.restart(victim)
    system.wait_for_workers()


def router_page(system: Any) -> str:
    return httpx.get(f"{system.stack.url}/metrics", timeout=30.0, trust_env=False).text


def metrics_of(worker: Any) -> str:
    return httpx.get(f"{worker.http_url}/metrics", timeout=30.0, trust_env=False).text


@pytest.fixture
def without_c(two_decode_workers: Any) -> Iterator[Any]:
    yield two_decode_workers
    post(two_decode_workers, "unload_lora_adapter", lora_name="c")


def test_another_file_of_the_same_name_answers_for_itself(
    without_c: Any, adapted: Adapted, random_prompts: Any
) -> None:
    system, folders = without_c, adapted.folders
    prompts = random_prompts((64, 64), vocab_size=256, seed=8)
    assert load(system, "c", folders["c"]).status_code == 200
    assert ask_all(system, ("c",), prompts)["c"] == adapted.expected("c", prompts)
    again = load(system, "c", folders["a"])
    assert again.status_code == 400 and "load_inplace" in again.text
    assert load(system, "c", folders["b"], load_inplace=True).status_code == 200
    assert ask_all(system, ("c",), prompts)["c"] == adapted.expected("b", prompts)
    assert post(system, "unload_lora_adapter", lora_name="c").status_code == 200
    gone = post(system, "completions", model="c", prompt="hi")
    assert gone.status_code == 404 and "model 'c' does not exist" in gone.json()["error"]["message"]
    assert load(system, "c", folders["a"]).status_code == 200
    assert ask_all(system, ("c",), prompts)["c"] == adapted.expected("a", prompts)


def test_requests_of_an_adapter_that_is_unloaded_go_on_to_their_end(
    without_c: Any, adapted: Adapted, random_prompts: Any
) -> None:
    system = without_c
    prompts = random_prompts((30, 30), vocab_size=256, seed=9)
    assert load(system, "c", adapted.folders["c"]).status_code == 200
    expected = adapted.expected("c", prompts, 400)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask_all, system, ("c",), prompts, max_tokens=400)
        wait_until(lambda: system.metric("vllm:num_requests_running", "decode") >= 2, "streams", PATIENCE_S)
        assert post(system, "unload_lora_adapter", lora_name="c").status_code == 200
        assert not answers.done(), "the answers are too short for this test"
        assert answers.result()["c"] == expected
    wait_until(
        lambda: all('state="free"} 1.0' in metrics_of(worker) for worker in system.stack.workers()),
        "places are free again",
        PATIENCE_S,
    )


def test_an_adapter_that_does_not_fit_is_refused_and_changes_nothing(
    two_decode_workers: Any, adapted: Adapted, tiny_folder: Path, tmp_path: Path
) -> None:
    wide = make_adapter(tmp_path / "wide", tiny_folder, rank=65)
    answer = load(two_decode_workers, "wide", wide)
    assert answer.status_code == 400 and "max_lora_rank" in answer.json()["error"]["message"].replace("-", "_")
    assert post(two_decode_workers, "completions", model="wide", prompt="hi").status_code == 404
    missing = load(two_decode_workers, "missing", tmp_path / "nowhere")
    assert missing.status_code == 400 and "cannot read" in missing.json()["error"]["message"]
    taken = load(two_decode_workers, MODEL, adapted.folders["a"])
    assert taken.status_code == 400 and "name of a model" in taken.json()["error"]["message"]
    assert post(two_decode_workers, "unload_lora_adapter", lora_name="missing").status_code == 404


@dataclass(frozen=True)
class QuantisedBase:
    """A checkpoint in a file's integers, the floats that they stand for, and an adapter made for these."""

    folder: Path
    dense: Path
    adapter: Path

    def expected(self, quantization: str, prompts: Sequence[list[int]]) -> dict[str, list[list[int]]]:
        """With "none" as transformers answers with the floats; with "auto" as the integers, in this process."""
        if quantization == "none":
            merged = merge(self.dense.with_name("merged"), self.dense, self.adapter)
            oracles = {"base": Oracle(transformers_model(self.dense)), "a": Oracle(transformers_model(merged))}
            return {name: [oracle.greedy(prompt, NUM_TOKENS) for prompt in prompts] for name, oracle in oracles.items()}
        model = load_model(resolve_model(str(self.folder)), quantization=quantization)
        place = AdapterBank(AdapterSlots(model, max_loras=1, max_rank=8)).load("a", str(self.adapter)).place
        with torch.inference_mode():
            return {
                name: [AdaptedPool(model).greedy_with(at, prompt, NUM_TOKENS, chunk=512) for prompt in prompts]
                for name, at in (("base", -1), ("a", place))
            }


@pytest.fixture(params=["awq", "w8a8 by channel"])
def quantised_base(request: pytest.FixtureRequest, tmp_path: Path, tiny_folder: Path) -> QuantisedBase:
    folder = tmp_path / "quantised"
    dense = write_checkpoint(tiny_folder, folder, FORMATS[request.param])
    return QuantisedBase(folder, dense, make_adapter(tmp_path / "a", dense, seed=1, rank=4, use_rslora=True))


@pytest.mark.own_engine
@pytest.mark.parametrize("quantization", ["none", "auto"])
def test_an_adapter_of_a_quantised_checkpoint(
    system_of: Any, quantised_base: QuantisedBase, random_prompts: Any, quantization: str
) -> None:
    """Its products are added to those of the file's integers, beside rows without it, with hits and preemption."""
    prompts = random_prompts(LENGTHS, vocab_size=256, seed=10)
    expected = quantised_base.expected(quantization, prompts)
    assert expected["a"] != expected["base"], "the adapter changes nothing"
    system = system_of(
        model=str(quantised_base.folder),
        quantization=quantization,
        router_flags=ROUTER_FLAGS,
        worker_flags=("--lora", f"a={quantised_base.adapter}"),
        decode_flags=("--num-blocks", "24", "--watermark", "0"),
    )
    for _ in range(2):
        assert ask_all(system, ("base", "a"), prompts, base=str(quantised_base.folder)) == expected
    assert system.metric("vllm:num_preemptions", "decode") > 0
    assert system.metric("vllm:prefix_cache_hits", "prefill") > 0


# ---------------------------------------------------------------- a file that names adapters


@pytest.fixture
def followed_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of `--lora-file` that a router of two processes follows: the flag is the same in every test."""
    return tmp_path_factory.getbasetemp() / "adapters.toml"


def name_adapters(file: Path, **folders: Path) -> None:
    tables = [f'[[adapter]]\nname = "{name}"\npath = "{folder}"\n' for name, folder in folders.items()]
    new = file.with_suffix(".new")
    new.write_text("\n".join(tables))
    new.rename(file)


def test_workers_hold_what_a_file_names(
    system_of: Any, adapted: Adapted, random_prompts: Any, followed_file: Path
) -> None:
    """With a router of two processes, of which one follows the file."""
    name_adapters(followed_file, a=adapted.folders["a"])
    flags = (*ROUTER_FLAGS, "--lora-file", str(followed_file), "--router-processes", "2")
    system = system_of(1, 1, router_flags=flags, worker_flags=("--max-loras", "3", "--dtype", "float32"))
    prompts = random_prompts((30, 30), vocab_size=256, seed=6)

    def serves(*names: str) -> None:
        wait_until(lambda: {one["id"] for one in models(system)} == {MODEL, *names}, f"{names} served", PATIENCE_S)
        expected = {name: adapted.expected(name, prompts) for name in ("base", *names)}
        assert ask_all(system, tuple(expected), prompts) == expected

    serves("a")
    name_adapters(followed_file, b=adapted.folders["b"], c=adapted.folders["c"])
    serves("b", "c")
    followed_file.write_text("[[adapter]]")  # refused: what was in force stays
    wait_until(lambda: "changed file rejected" in system.stack.router.log.read_text(), "refused", PATIENCE_S)
    serves("b", "c")
    name_adapters(followed_file, a=adapted.folders["a"], c=adapted.folders["c"] / "missing")
    wait_until(lambda: "order failed, will be retried" in system.stack.router.log.read_text(), "said why", PATIENCE_S)
    serves("a", "c")  # the former c
    name_adapters(followed_file)
    serves()
