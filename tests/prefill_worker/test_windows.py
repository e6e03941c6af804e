"""Prompts of a model that looks back through a window: how many blocks they own.

`test_scheduler.py` has any interleaving.
"""

from __future__ import annotations

from common.blocks.block_hash import BlockHasher
from common.blocks.window import HOLE, Window
from common.engine.kv.block_pool import BlockPool
from common.latency.step_model import StepModel
from common.wire.message_fields import pack_tokens
from common.wire.messages import PrefillRequest
from common.wire.sampling_params import SamplingParams
from prefill_worker.scheduler import PrefillChunk, PrefillScheduler, PrefillSequence

SIZE, WINDOW, BUDGET = 4, 10, 8
MODEL = StepModel()
VIEW = Window(WINDOW, SIZE)
MOST = VIEW.span_blocks(BUDGET)


def scheduler(num_blocks: int = 32, *, window: int = WINDOW, max_num_seqs: int = 4) -> PrefillScheduler:
    pool = BlockPool(num_blocks, SIZE)
    return PrefillScheduler(pool, max_num_batched_tokens=BUDGET, max_num_seqs=max_num_seqs, window=window)


def prompt(name: str, tokens: list[int], at: float = 0.0) -> PrefillSequence:
    params = SamplingParams(max_tokens=8)
    request = PrefillRequest(request_id=name, attempt=0, prompt=pack_tokens(tokens), params=params)
    return PrefillSequence(b"router", request, tokens, BlockHasher(SIZE), at, at + 60.0)


def check(chunk: PrefillChunk) -> None:
    """The table names a block for every key that the chunk reads or writes."""
    first, end = VIEW.first_block(chunk.start), -(-(chunk.start + chunk.num_tokens) // SIZE)
    used = chunk.sequence.blocks[first:end]
    assert len(used) == end - first and HOLE not in used and len(set(used)) == len(used)


def run(plan: PrefillScheduler) -> int:
    """Compute one step; how many tokens it had."""
    chunks = plan.schedule(1.0, MODEL).chunks
    for chunk in chunks:
        check(chunk)
        plan.advance(chunk, 2.0)
    return sum(chunk.num_tokens for chunk in chunks)


def test_a_prompt_longer_than_the_cache_is_computed_in_the_blocks_of_a_step() -> None:
    plan, long = scheduler(MOST), prompt("a", list(range(200)))
    plan.add(long)
    most = 0
    while not long.computed:
        assert run(plan) == BUDGET
        most = max(most, plan.check_integrity().owned)
    assert most == MOST and long.num_owned == 50 - VIEW.first_block(200)
    assert long.blocks[: long.num_gone] == [HOLE] * VIEW.first_block(200)


def test_more_prompts_fit_in_the_same_blocks() -> None:
    admitted = {}
    for window in (0, WINDOW):
        plan = scheduler(30, window=window, max_num_seqs=8)
        for number in range(8):
            plan.add(prompt(str(number), [number] * 60, at=float(number)))
        for _ in range(8 * 8):
            run(plan)
        admitted[window] = sum(sequence.computed for sequence in plan)
        plan.check_integrity()
    assert admitted == {0: 2, WINDOW: 8}


def test_blocks_out_of_the_window_stay_cached_until_others_need_them() -> None:
    plan, first = scheduler(64), prompt("a", list(range(60)))
    plan.add(first)
    while not first.computed:
        run(plan)
    plan.remove(first)
    assert plan.check_integrity().cached == 15
    same = prompt("b", [*range(60), 99, 98])
    plan.add(same)
    chunks = plan.schedule(1.0, MODEL).chunks
    assert [(chunk.start, chunk.num_tokens) for chunk in chunks] == [(60, 2)] and same.num_cached == 60
    assert same.num_owned == 16 - VIEW.first_block(60)


def test_a_hit_needs_the_last_window_alone() -> None:
    """Others have taken the blocks before it, which leave the cache first."""
    plan = scheduler(12)
    for name, tokens in (("a", list(range(60))), ("b", [7] * 20)):
        plan.add(sequence := prompt(name, tokens))
        while not sequence.computed:
            run(plan)
        plan.remove(sequence)
    again = prompt("c", [*range(60), 99])
    plan.add(again)
    assert not plan.pool.match(again.hasher.extend(again.token_ids)[:1])
    run(plan)
    assert again.num_cached == 60 and again.computed
