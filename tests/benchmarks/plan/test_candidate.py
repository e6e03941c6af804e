from __future__ import annotations

from benchmarks.plan.candidate import Candidate, Flags, base_flags, every, neighbours, scenario, shapes

from .conftest import make_spec

DEFAULTS = Flags(64, 512, 256, 1024)
"""Decode workers that know a goal for tokens choose up to these."""


def test_flags_begin_with_the_settings_of_workers_and_router() -> None:
    assert base_flags(make_spec()) == DEFAULTS
    spec = make_spec(
        settings={"local_prefill_threshold": 9}, prefill={"max_step_tokens": 2048}, decode={"max_num_seqs": 8}
    )
    assert base_flags(spec) == Flags(9, 2048, 8, 1024)


def test_bounds_hold_for_all_shapes() -> None:
    spec = make_spec(prefill={"price": 3.0, "most": 2}, bounds={"max_workers": 4, "max_cost": 7.0})
    found = {
        (one.num_prefill, one.num_decode)
        for one_pool in (True, False)
        for one in shapes(spec, DEFAULTS, one_pool=one_pool)
    }
    assert found == {(0, 1), (0, 2), (0, 3), (0, 4), (1, 1), (1, 2), (1, 3), (2, 1)}


def test_one_pool_has_no_flags_of_two() -> None:
    spec = make_spec(search={"local_prefill_threshold": [64, 512], "local_prefill_chunk": [128, 256]})
    assert len([one for one in every(spec) if one == Candidate(0, 1, one.flags)]) == 2
    assert {one.flags.local_prefill_chunk for one in neighbours(Candidate(0, 1, base_flags(spec)), spec)} == {256}
    assert len(list(neighbours(Candidate(1, 1, base_flags(spec)), spec))) == 2


def test_a_scenario_has_the_candidates_workers_flags_and_load() -> None:
    spec = make_spec(settings={"max_wait_s": 5.0})
    made = scenario(spec, Candidate(2, 3, Flags(7, 1024, 32, 256)), 4, load_factor=0.5, goals=spec.goals)
    prefill, decode = made.pool
    assert (prefill.count, prefill.max_step_tokens, decode.count) == (2, 1024, 3)
    assert (decode.max_num_seqs, decode.max_step_tokens) == (32, 256)
    assert made.settings == {"max_wait_s": 5.0, "local_prefill_threshold": 7}
    assert (made.load.rate, made.duration_s, made.seed, made.goals.ttft_ms) == (2.5, 16.0, 4, 500.0)
    stepped = make_spec(load={"rate": 0.0, "rates": [[0, 4.0], [4, 8.0]]})
    made = scenario(stepped, Candidate(0, 1, DEFAULTS), 1, load_factor=2.0, goals=spec.goals)
    assert (made.load.rates, made.duration_s) == (((0.0, 8.0), (2.0, 16.0)), 4.0)
