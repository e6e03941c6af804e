import gzip
from pathlib import Path

import pytest

from benchmarks.load.trace import TraceError, TraceRow, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
MOONCAKE = """{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14]}
"""


def write(folder: Path, text: str, name: str = "trace.txt") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_azure_rows_are_relative_to_the_first(tmp_path: Path, name: str) -> None:
    rows = read_trace(write(tmp_path, AZURE, name))
    assert [row.arrival_s for row in rows] == pytest.approx([0.0, 4.314579, 4.541877])
    assert [(row.input_len, row.output_len) for row in rows] == [(374, 44), (396, 109), (879, 55)]


def test_azure_timestamps_with_a_zone(tmp_path: Path) -> None:
    text = AZURE.splitlines()[0] + "\n2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01.009930+00:00,7,5\n"
    assert [row.arrival_s for row in read_trace(write(tmp_path, text))] == pytest.approx([0.0, 1.0])


def test_mooncake_rows_carry_their_blocks(tmp_path: Path) -> None:
    rows = read_trace(write(tmp_path, MOONCAKE))
    assert rows == [TraceRow(0.0, 6758, 500, (0, 1, 2)), TraceRow(3.0, 7322, 490, (0, 14))]


def test_limit_and_order(tmp_path: Path) -> None:
    late_first = "\n".join(reversed(MOONCAKE.splitlines()))
    assert [row.input_len for row in read_trace(write(tmp_path, late_first))] == [6758, 7322]
    assert len(read_trace(write(tmp_path, MOONCAKE), limit=1)) == 1


def test_a_part_at_the_begin_can_be_left_out(tmp_path: Path) -> None:
    file = write(tmp_path, AZURE)
    assert [row.input_len for row in read_trace(file, begin=0.4)] == [396, 879]
    (row,) = read_trace(file, limit=1, begin=0.4)
    assert (row.arrival_s, row.input_len) == (0.0, 396)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no requests"),
        ("a,b\n1,2\n", "txt:1: neither the header"),
        (AZURE + "yesterday,1,2\n", "txt:5: 'yesterday,1,2'"),
        (AZURE + "2023-11-16 18:15:46,0,2\n", "txt:5: 0 input"),
        ('{"timestamp": 0}\n', "input_length"),
        (MOONCAKE + "{broken\n", "txt:3"),
    ],
)
def test_a_bad_trace_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        read_trace(write(tmp_path, text))


def test_a_missing_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "absent.csv")
