"""A draft head through two pools: its KV travels with the model's, and the tokens are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..common.engine.models.generation import transformers_model
from ..draft_heads import certain_model, right_eagle, right_mtp, with_tokenizer
from ..eagle3_heads import far_model, right_eagle3
from .conftest import Oracle
from .test_draft_model import KINDS, answers, answers_survive_a_kill_and_a_drain, counted
from .test_failures import ALL_REMOTE, SLOW_PREFILL

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400), pytest.mark.slow]
NUM_LAYERS = 24
"""Of which the first alone adds something: a head of one such layer says the same in a small part of the time."""
LENGTHS = (1, 15, 16, 17, 40, 130, 300)
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def eagle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model in the form of Llama, and an EAGLE or EAGLE-3 head that greedy tokens agree with."""
    folder = tmp_path_factory.mktemp(request.param)
    make_model, make_head = (certain_model, right_eagle) if request.param == "eagle" else (far_model, right_eagle3)
    served = make_model(folder / "model", num_layers=NUM_LAYERS)
    return str(served), str(make_head(folder / "head", served))


@pytest.fixture(scope="module")
def mtp(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint whose MTP layer says what the model says, with experts and latents."""
    folder = tmp_path_factory.mktemp("mtp") / "deepseek-v3"
    return str(with_tokenizer(right_mtp(folder, folder.name, num_layers=NUM_LAYERS)))


def drafting(head: str, *flags: str) -> dict[str, tuple[str, ...]]:
    return {"router_flags": ALL_REMOTE, "worker_flags": ("--draft-head", head, *flags)}


def test_an_mtp_layer_changes_no_token(system_of: Any, random_prompts: Any, mtp: str) -> None:
    """In chunks, cached and not, one after the other and side by side."""
    oracle = Oracle(transformers_model(Path(mtp)))
    prompts = random_prompts(LENGTHS, vocab_size=256, seed=61)
    expected = [oracle.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    system = system_of(model=mtp, prefill_flags=SLOW_PREFILL, **drafting("mtp"))
    for at_once in (1, 8, 2):  # the second and third time prompts are cached
        assert system.generate(prompts, max_tokens=NUM_TOKENS, at_once=at_once) == expected
    counts = counted(system, "model")
    assert counts["accepted_tokens"] > 0.8 * counts["draft_tokens"] > 5
    assert system.metric("vllm:prefix_cache_hits", "prefill") > 0


@pytest.mark.parametrize(("eagle", "transport"), [("eagle", "shm"), ("eagle3", "tcp")], indirect=["eagle"])
def test_an_eagle_head_changes_no_token(
    system_of: Any, random_prompts: Any, eagle: tuple[str, str], transport: str
) -> None:
    served, head = eagle
    prompts = random_prompts(LENGTHS, vocab_size=256, seed=62)
    plain = system_of(model=served, router_flags=ALL_REMOTE, decode_flags=("--max-draft-tokens", "0"))
    greedy = plain.generate(prompts, max_tokens=NUM_TOKENS)
    expected = [answers(plain, prompts[3:6], params) for params in KINDS]
    system = system_of(model=served, **drafting(head, "--kv-transport", transport))
    for at_once in (1, 8):
        assert system.generate(prompts, max_tokens=NUM_TOKENS, at_once=at_once) == greedy
    found = [answers(system, prompts[3:6], params) for params in KINDS]
    for ours, theirs in zip(found, expected, strict=True):
        assert [answer[:3] for answer in ours] == [answer[:3] for answer in theirs]
    assert counted(system, "model")["accepted_tokens"] > 5


@pytest.mark.parametrize("eagle", ["eagle"], indirect=True)
def test_preempted_answers_are_the_same(system_of: Any, random_prompts: Any, eagle: tuple[str, str]) -> None:
    served, head = eagle
    prompts = random_prompts((30, 40, 50, 60, 70, 80), vocab_size=256, seed=63)
    expected = system_of(model=served, router_flags=ALL_REMOTE).generate(prompts, max_tokens=100)
    system = system_of(model=served, decode_flags=("--num-blocks", "24", "--watermark", "0"), **drafting(head))
    assert system.generate(prompts, max_tokens=100, at_once=6) == expected
    assert system.metric("vllm:num_preemptions", "decode") > 0
    assert counted(system, "model")["accepted_tokens"] > 0


@pytest.mark.parametrize("eagle", ["eagle3"], indirect=True)
def test_a_killed_decode_worker_and_one_that_drains(
    system_of: Any, random_prompts: Any, eagle: tuple[str, str]
) -> None:
    served, head = eagle
    given = drafting(head, "--drain-timeout-s", "60")
    given["router_flags"] += ("--drain-timeout-s", "60")
    system = system_of(1, 2, model=served, **given)
    prompts = random_prompts((30, 200, 350), vocab_size=256, seed=64)
    answers_survive_a_kill_and_a_drain(system, prompts)


@pytest.mark.parametrize("eagle", ["eagle"], indirect=True)
def test_workers_with_and_without_a_head_are_not_paired(
    system_of: Any, random_prompts: Any, eagle: tuple[str, str]
) -> None:
    """The decode worker then computes the prompts itself."""
    served, head = eagle
    prompts = random_prompts((40, 130), vocab_size=256, seed=65)
    expected = system_of(model=served, router_flags=ALL_REMOTE).generate(prompts, max_tokens=20)
    system = system_of(model=served, router_flags=ALL_REMOTE, decode_flags=("--draft-head", head))
    assert system.generate(prompts, max_tokens=20) == expected
    assert system.metric("diptych_kv_transfer_bytes", "decode") == 0
