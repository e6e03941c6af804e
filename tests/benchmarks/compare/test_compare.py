"""The comparison's arithmetic and plans, and a whole run of Diptych's tiny model beside a peer made for the purpose."""

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.compare import __main__ as compare
from benchmarks.compare.engines import PEERS, choose_variant, peer_environments
from benchmarks.compare.peer import Launch, Peer, PeerError, Site
from benchmarks.compare.ratios import METRICS, Cell, Load, find_problem, parse_loads, ratios, rows
from benchmarks.compare.rounds import Run, bounds, describe_runs, num_requests, token_ids
from benchmarks.load.summary import RequestRecord, Summary, summarise
from benchmarks.script import settings_of
from common.model_files.resolve import resolve_model

from ..fake_engine import fake_process

LOAD = Load(4, 3, concurrency=1)


def record(ttft_s: float, gap_s: float, *, outcome: str = "ok", prompt: int = 4, output: int = 3) -> RequestRecord:
    times = [ttft_s + gap_s * i for i in range(3)]
    return RequestRecord(0, token_times=times, prompt_tokens=prompt, output_tokens=output, outcome=outcome)


def summary(ttft_s: float = 0.1, gap_s: float = 0.2) -> Summary:
    return summarise([record(ttft_s, gap_s)])


def test_loads_are_workloads_by_concurrency_then_open_loops() -> None:
    loads = parse_loads("128/128, 512/64", "1,8", "512/64@0.4")
    assert [str(load) for load in loads] == [
        "128/128 c=1",
        "128/128 c=8",
        "512/64 c=1",
        "512/64 c=8",
        "512/64 0.4/s",
    ]


@pytest.mark.parametrize(
    "bad", [("128", "1", ""), ("128/0", "1", ""), ("8/8", "0", ""), ("", "", ""), ("", "", "8/8"), ("", "", "8/8@0")]
)
def test_a_load_that_is_none_is_refused(bad: tuple[str, str, str]) -> None:
    with pytest.raises(ValueError):
        parse_loads(*bad)


def test_requests_grow_with_concurrency_and_open_loops_are_bounded_by_time() -> None:
    options = Namespace(per_user=3, min_requests=6)
    counts = [num_requests(Load(8, 8, users), options) for users in (1, 2, 32)]
    assert [*counts, num_requests(Load(8, 8, rate=0.4), options)] == [6, 6, 96, 0]


def test_ratios_are_ours_over_theirs_by_medians() -> None:
    ours, theirs = Cell(), Cell()
    for ttft in (0.1, 0.2, 9.0):
        ours.add(LOAD, summary(ttft))
    theirs.add(LOAD, summary(0.4, gap_s=0.1))
    found = ratios(ours, theirs)
    assert found["TTFT mean"] == pytest.approx(0.5)
    assert found["TPOT mean"] == pytest.approx(2.0)
    assert found["output tok/s"] == pytest.approx((3 / 0.6) / (3 / 0.6))
    assert set(found) == {metric.name for metric in METRICS}


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([record(0.1, 0.1), record(0.1, 0.1, outcome="http 500")], "1 of 2 requests failed"),
        ([record(0.1, 0.1, prompt=5)], "5 prompt tokens a request instead of 4"),
        ([record(0.1, 0.1, output=2)], "2 output tokens a request instead of 3"),
        ([], "0 of 0 requests failed"),
    ],
)
def test_other_work_than_asked_for_is_no_sample(records: list[RequestRecord], words: str) -> None:
    cell = Cell()
    cell.add(LOAD, summarise(records))
    assert words in cell.problems[0]
    assert cell.medians() == {}


def test_a_cached_prompt_is_a_problem() -> None:
    cached = record(0.1, 0.1)
    cached.cached_tokens = 2
    assert "cache" in find_problem(LOAD, summarise([cached]))
    assert find_problem(LOAD, summary()) == ""


def test_a_row_has_every_pair_and_survives_an_engine_that_failed() -> None:
    ours, failed = Cell(), Cell(problems=["did not start"])
    ours.add(LOAD, summary())
    table = rows({"diptych:a": {LOAD: ours}, "vllm:bf16": {LOAD: failed}}, ["diptych:a"], ["vllm:bf16"])
    assert table[0]["ratios"] == {"diptych:a / vllm:bf16": {}}
    assert table[0]["engines"]["vllm:bf16"] == {"medians": {}, "samples": {}, "problems": ["did not start"]}


def test_engines_have_room_for_the_longest_and_the_widest_load() -> None:
    assert bounds([Load(128, 128, 1), Load(512, 2, 1)]) == (768, 32)
    assert bounds([Load(128, 127, 64)]) == (256, 64)


def test_runs_are_described_with_the_reason_of_those_that_failed() -> None:
    assert describe_runs([Run(1.26, 300.04), "no port"]) == {"start_s": [1.3, "no port"], "memory_mib": [300.0]}


def test_settings_name_no_folder_of_a_machine() -> None:
    options = Namespace(model="/m/x.gguf", peer_env=["openvino=/a/b"], log_dir=Path("/logs"), plot=None, repeats=2)
    assert settings_of(options) == {"model": "x.gguf", "peer_env": ["openvino=b"], "plot": None, "repeats": 2}


def test_a_peer_is_named_with_or_without_variant() -> None:
    assert choose_variant("vllm") == (PEERS["vllm"], "bf16")
    assert choose_variant("llama.cpp:bf16") == (PEERS["llama.cpp"], "bf16")
    for wrong in ("vlm", "vllm:int3"):
        with pytest.raises(ValueError, match="known are|has no variant"):
            choose_variant(wrong)


def test_environments_are_named_unless_there_is_one(tmp_path: Path) -> None:
    peers = [PEERS["vllm"], PEERS["openvino"]]
    assert peer_environments([str(tmp_path)], peers[:1]) == {"vllm": tmp_path}
    found = peer_environments([f"openvino={tmp_path}"], peers)
    assert found["openvino"] == tmp_path
    assert found["vllm"] != tmp_path
    for wrong in (str(tmp_path), f"llama.cpp={tmp_path}", "vllm="):
        with pytest.raises(ValueError, match="NAME=FOLDER"):
            peer_environments([wrong], peers)


def test_a_peer_that_is_not_installed_says_how(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="--prepare openvino"):
        PEERS["openvino"].version(tmp_path)


def test_prompts_are_drawn_from_the_models_own_vocabulary() -> None:
    ids = token_ids(resolve_model("tiny-random"))
    assert len(ids) > 32
    assert max(ids) < resolve_model("tiny-random").vocab_size


def test_a_refused_setting_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["--model=tiny-random", "--peer=nobody"]) == 2
    assert "nobody" in capsys.readouterr().err


class FakePeer(Peer):
    name = "fake"
    variants = {"only": "hf"}

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def version(self, env: Path) -> str:
        return "1"

    def launch(self, variant: str, site: Site, ports: Sequence[int]) -> Launch:
        assert site.weights["hf"].joinpath("model.safetensors").exists()
        return fake_process(self.folder, ports[0])


@pytest.mark.slow
@pytest.mark.e2e
def test_a_whole_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "fake", FakePeer(tmp_path))
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    output, picture = tmp_path / "c.json", tmp_path / "c.png"
    flags = "--model=tiny-random --peer=fake --workload=8/4 --concurrency=2 --open-loop=8/30@5 --open-loop-s=1 "
    variant = "--diptych=f32=DIPTYCH_KV_MEMORY_GIB=0.05 --dtype float32 --threads 1"
    status = compare.main([*flags.split(), variant, "--repeats=1", f"--output={output}", f"--plot={picture}"])
    found = json.loads(output.read_text())
    closed, opened = found["rows"]
    assert closed["ratios"]["diptych:f32 / fake:only"]["output tok/s"] > 0
    assert opened["engines"]["diptych:f32"]["problems"] == []
    assert opened["engines"]["fake:only"]["problems"] == ["20 output tokens a request instead of 30"]
    assert status == 1  # that run did not count
    assert found["engines"]["diptych:f32"]["environment"] == {"DIPTYCH_KV_MEMORY_GIB": "0.05"}
    assert found["engines"]["fake:only"]["memory_mib"][0] > 1
    assert picture.exists()
