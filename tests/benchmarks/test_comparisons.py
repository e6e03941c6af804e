"""The measuring scripts: their arithmetic, and short runs of what needs no model."""

import asyncio
import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import interference, kv_threads, kv_wire, overlap
from benchmarks.arms import Target
from benchmarks.interference import ARMS, Result, Run
from benchmarks.load.conditions import conditions
from benchmarks.load.summary import RequestRecord
from benchmarks.overlap import DISAGGREGATED, LENGTHS, LOCAL, Cell
from benchmarks.quantised_blocks import HEAD_BYTES

from .conftest import ScriptedServer


def test_a_secret_is_not_in_the_command() -> None:
    for argv in (["--api-key", "hidden", "--rate", "1"], ["--api-key=hidden"]):
        command = conditions("diptych bench", argv)["command"]
        assert "hidden" not in command
        assert "***" in command


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("/home/me/traces", "traces"),
        ("--output=/home/me/result.json", "--output=result.json"),
        ("name=/home/me/env/,/srv/other", "name=env,other"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("512/64@1.6", "512/64@1.6"),
        ("results/one.json", "results/one.json"),
    ],
)
def test_folders_of_a_machine_are_not_in_the_command(argument: str, shown: str) -> None:
    assert conditions("diptych bench", [argument])["command"] == f"diptych bench {shown}"


def test_overlap_compares_medians() -> None:
    def cell(ttft: float, **more: list[float]) -> Cell:
        return Cell(ttft=[ttft, ttft + 1, 999.0], first_gap=[5.0], later_gap=[4.0], **more)

    remote = {length: cell(104.0, exposed=[1.0, 3.0], prefill=[50.0]) for length in LENGTHS}
    rows = overlap.compare({DISAGGREGATED: remote, LOCAL: {length: cell(99.0) for length in LENGTHS}})
    assert [row["prompt_tokens"] for row in rows] == list(LENGTHS)
    assert rows[0]["ttft_ratio"] == pytest.approx(1.05)
    assert rows[0]["exposed_share_of_prefill"] == pytest.approx(0.04)
    assert "exposed_ms" not in rows[0][LOCAL]


def test_overlap_separates_the_first_gap() -> None:
    cell = Cell()
    cell.add(RequestRecord(0, start=1.0, token_times=[1.5, 1.7, 1.8, 1.9], outcome="ok"))
    assert [*cell.ttft, *cell.first_gap, *cell.later_gap] == pytest.approx([500, 200, 100])


def test_interference_tells_quiet_from_busy() -> None:
    run = Run(gaps=[(-1.0, 0.01), (0.0, 0.01), (1.0, 0.05), (2.0, 0.15)], ttfts=[0.8], duration_s=4.0)
    row = run.row()
    assert (row["quiet_p50_ms"], row["p50_ms"], row["max_ms"]) == pytest.approx((10, 100, 150))
    assert row["tokens_per_s"] == pytest.approx(0.5)


def test_interference_against_a_server(server: ScriptedServer, tmp_path: Path) -> None:
    options = Namespace(
        streams=2, stream_input_len=8, stream_output_len=500, prompt_len=32, every_s=0.1, quiet_s=0.3, busy_s=0.6
    )

    async def arm() -> Run:
        target = Target.of(server.url)
        run = await interference.run_arm(target, options, seed=1)
        await target.client.close()
        return run

    run = asyncio.run(arm())
    assert len(run.ttfts) >= 2
    assert any(at <= 0 for at, _ in run.gaps)
    assert any(at > 0 for at, _ in run.gaps)
    interference.plot(tmp_path / "i.png", [Result(ARMS[0], [run]), Result(ARMS[1], [run])], "title")
    assert (tmp_path / "i.png").read_bytes().startswith(b"\x89PNG")


def test_pinned_pools_share_no_core() -> None:
    for arm in ARMS:
        if "1P1D pinned" in arm.name:
            assert not set(arm.decode_cores) & set(arm.prefill_cores)


@pytest.mark.parametrize("block_bytes", [65537, 16 * HEAD_BYTES])
def test_kv_wire_moves_blocks_between_processes(tmp_path: Path, block_bytes: int) -> None:
    output, picture = tmp_path / "k.json", tmp_path / "k.png"
    flags = ["--mib=2", "--repeats=1", f"--block-bytes={block_bytes}", "--curve", f"--output={output}"]
    assert kv_wire.main([*flags, f"--plot={picture}"]) == 0
    result = json.loads(output.read_text())
    rows = result["rows"]
    assert len([row for row in rows if row["path"].endswith("CURVE")]) == len(result["curve_of_plain"]) == 3
    floors = [row["path"] for row in rows if not row["path"].startswith("KV")]
    assert floors == [*kv_wire.RAW_WRITES, kv_wire.COPY]
    assert [row["path"] for row in rows if "memory" in row["path"] and row["path"] not in floors] == [
        "KV, shared memory",
        "KV, shared memory, no checksum",
    ]
    assert ("KV, through a ring" in {row["path"] for row in rows}) == (block_bytes % HEAD_BYTES == 0)
    assert all(row["gb_per_s"] > 0 for row in rows)
    assert picture.exists()


def test_kv_threads_tells_the_busiest_of_each_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_threads, "CASES", ((2, 2),))
    output = tmp_path / "t.json"
    assert kv_threads.main(["--mib=8", "--repeats=1", f"--output={output}"]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [row["way"] for row in rows] == [
        "2 sockets, 2 I/O threads",
        "2 sockets, 2 I/O threads, CURVE",
        "TLS 1.3, AES-256-GCM",
    ]
    for row in rows:
        busiest = max(row["sender_s_per_gb"], row["receiver_s_per_gb"])
        assert min(row["sender_s_per_gb"], row["receiver_s_per_gb"]) > 0
        assert row["most_gb_per_s"] == pytest.approx(1 / busiest, rel=0.1)
