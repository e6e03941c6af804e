import json
from pathlib import Path

from benchmarks.prompt_order import main

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{number % 60:02}.0,{8000 if number % 10 == 0 else 100},5\n" for number in range(60)
)


def test_the_order_has_a_lower_mean_than_first_come(tmp_path: Path) -> None:
    trace, output = tmp_path / "trace.csv", tmp_path / "rows.json"
    trace.write_text(TRACE)
    assert main([str(trace), "--loads", "0.9", "--goals", "0", "2", "--output", str(output)]) == 0
    rows = {(row["order"], row["goal_s"]): row for row in json.loads(output.read_text())["rows"]}
    for goal_s in (0.0, 2.0):
        assert rows["order", goal_s]["mean_s"] < rows["fcfs", goal_s]["mean_s"]
        assert rows["order", goal_s]["met"] >= rows["fcfs", goal_s]["met"]
