"""Sampled runs repeat: the noise is a function of (seed, position), whatever else is in the batch."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

SAMPLED = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 30, "ignore_eos": True}


@pytest.mark.parametrize("shape", [(1, 1), (0, 1)])
def test_same_seed_same_text_alone_and_in_a_batch(system_of: Any, random_prompts: Any, shape: tuple[int, int]) -> None:
    system = system_of(*shape, router_flags=("--local-prefill-threshold", "0"))
    prompt, *others = random_prompts((90, *range(20, 330, 10)), vocab_size=256, seed=1)
    (alone,) = system.generate([prompt], seed=42, **SAMPLED)
    crowd = system.generate([*others, prompt], seed=42, at_once=32, **SAMPLED)
    assert crowd[-1] == alone
    (other_seed,) = system.generate([prompt], seed=43, **SAMPLED)
    assert other_seed != alone


@pytest.mark.own_engine
def test_disaggregated_and_local_sample_the_same(system_of: Any, random_prompts: Any) -> None:
    prompts = random_prompts((50, 130, 257), vocab_size=256, seed=2)
    remote = system_of(router_flags=("--local-prefill-threshold", "0")).generate(prompts, seed=7, **SAMPLED)
    local = system_of(0, 1).generate(prompts, seed=7, **SAMPLED)
    assert remote == local
