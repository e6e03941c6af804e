"""Conversations out of a trace, and the benchmark of tiers over whole systems."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import tiers
from benchmarks.conversations import conversations, last_turns, num_distinct, shared_blocks
from benchmarks.load.trace import TraceRow

FIRST = [(0, 1, 2, 3), (0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 5)]
SECOND = [(0, 7, 8, 9), (0, 7, 8, 9, 10)]
BLOCKS = [FIRST[0], SECOND[0], FIRST[1], (0, 20, 21, 22), SECOND[1], FIRST[2], tuple(range(100))]
ROWS = [TraceRow(float(number), 2000, 9, blocks) for number, blocks in enumerate(BLOCKS)]


def test_conversations_are_turns_that_go_on_from_each_other() -> None:
    def chosen(**options: int) -> list[tuple[int, ...]]:
        rows = conversations(ROWS, most_blocks=50, block_tokens=16, **options)
        assert all(row.input_len == 16 * len(row.block_ids) for row in rows)
        return [row.block_ids for row in rows]

    assert chosen(number=9, least_turns=2) == [FIRST[0], SECOND[0], FIRST[1], SECOND[1], FIRST[2]]
    assert chosen(number=9, least_turns=3) == chosen(number=1, least_turns=2) == FIRST
    assert len(chosen(number=9, least_turns=1)) == 6


def test_what_of_them_came_before() -> None:
    assert shared_blocks(ROWS[:6]) == [0, 1, 4, 1, 4, 5]
    assert num_distinct(ROWS[:6]) == 13
    assert last_turns(ROWS[:6]) == [3, 4, 5]


@pytest.mark.e2e
def test_a_short_run_reads_conversations_from_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "tiers.json"
    lines = [
        {"timestamp": 1000 * number, "input_length": 512 * len(blocks), "output_length": 9, "hash_ids": blocks}
        for number, blocks in enumerate([*BLOCKS[:6], (50, 51, 52, 53), FIRST[2]])
    ]
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    load = ["--conversations", "9", "--turns", "2", "--new", "2", "--new-len", "60", "--repeats", "1", "--times", "2"]
    model = ["--model", "tiny-random", "--dtype", "float32", "--threads", "1", "--disk-gib", "0.05"]
    assert tiers.main([str(trace), *load, *model, "--output", str(out)]) == 0
    found = json.loads(out.read_text())
    (with_file,), (alone,), (pulling,) = (found["rounds"][arm] for arm in (tiers.WITH, tiers.WITHOUT, tiers.PULLS))
    assert with_file["hit_rates"]["disk"] > 0 == alone["hit_rates"]["disk"] == pulling["hit_rates"]["disk"]
    assert alone["hit_rates"]["peer"] == with_file["hit_rates"]["peer"] == 0
    assert with_file["restart"]["first_from_disk"] == with_file["restart"]["first_prompt_tokens"] - 16
    assert "TTFT in ms" in capsys.readouterr().out
