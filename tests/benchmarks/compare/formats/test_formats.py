"""Formats beside peers: the choice of peers, the figures and their table, and a run of two formats of a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import save_file

from benchmarks.compare import checkpoints, weights
from benchmarks.compare.engines import choose_variant
from benchmarks.compare.formats import __main__ as formats
from benchmarks.compare.formats.catalogue import FORMATS, choose, nearest
from benchmarks.compare.formats.files import bytes_by_type, bytes_of_a_step
from benchmarks.compare.formats.picture import plot
from benchmarks.compare.formats.table import COLUMNS, Held, Loads, beside, cells, figures, markdown
from benchmarks.compare.ratios import Cell, Load
from common.errors import ModelError
from common.model_files.resolve import resolve_model
from kernels.cpu.backend import native_backend

LOADS = Loads(Load(8, 8, 1), Load(64, 2, 1), Load(8, 8, 4))


def measured(tpot_ms: float, ttft_ms: float, rate: float) -> dict[Load, Cell]:
    one = Cell({"TPOT mean": [tpot_ms, tpot_ms, 99.0]})
    return {LOADS.one: one, LOADS.prompt: Cell({"TTFT mean": [ttft_ms]}), LOADS.many: Cell({"output tok/s": [rate]})}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_can_be_written_and_every_peer_named(name: str) -> None:
    assert FORMATS[name].source in {*weights.FORMATS, *checkpoints.FORMATS}
    for peer in FORMATS[name].peers:
        engine, variant = choose_variant(peer)
        assert engine.variants[variant] in weights.FORMATS


def test_all_layouts_of_checkpoints_are_served() -> None:
    assert set(checkpoints.FORMATS) <= {one.source for one in FORMATS.values()}


def test_formats_are_chosen_by_name_each_once() -> None:
    assert [one.name for one in choose("q6_k, awq,q6_k")] == ["q6_k", "awq"]
    for wrong in ("q9", "", "awq,q9"):
        with pytest.raises(ValueError, match="known are bf16"):
            choose(wrong)


def test_peers_are_the_nearest_of_the_chosen_formats() -> None:
    chosen = choose("bf16,awq,q4_k_m,q5_k_m")
    theirs = ["llama.cpp:q4_0", "llama.cpp:q4_k_m", "llama.cpp:q5_k_m"]
    assert nearest(chosen, ["llama.cpp"]) == theirs
    assert nearest(chosen, ["openvino", "llama.cpp"]) == ["openvino:q4_1", *theirs]
    assert nearest(chosen, []) == []


def test_figures_are_medians_beside_the_floor() -> None:
    row = figures(measured(10.0, 320.0, 50.0), LOADS, Held({"Q8_0": 142_900_000}, 200_000_000), [700.0, 900.0], 20e9)
    assert row == {
        "file_mb": {"Q8_0": 142.9},
        "tpot_ms": 10.0,
        "tpot_ms_rounds": [10.0, 10.0, 99.0],
        "prompt_tokens_per_s": 200.0,
        "output_tokens_per_s": 50.0,
        "output_tokens_per_s_rounds": [50.0],
        "memory_mib": 800.0,
        "step_mb": 200.0,
        "floor_ms": 10.0,
    }


def test_what_was_not_measured_has_no_figure() -> None:
    failed = {load: Cell() for load in LOADS.all()}
    assert figures(failed, LOADS, Held({}), [], 20e9) == {"file_mb": {}}
    assert figures(measured(10.0, 320.0, 50.0), LOADS, Held({}, 5), [], 0.0).keys() == {
        *("file_mb", "tpot_ms", "tpot_ms_rounds", "prompt_tokens_per_s"),
        *("output_tokens_per_s", "output_tokens_per_s_rounds"),
    }


def test_ratios_are_ours_over_the_peers_that_were_measured() -> None:
    row = figures(measured(10.0, 320.0, 50.0), LOADS, Held({}), [], 0.0)
    others = {"llama.cpp:q4_0": figures(measured(20.0, 640.0, 40.0), LOADS, Held({}), [], 0.0), "openvino:q4_1": {}}
    found = beside(row, others, ("llama.cpp:q4_0", "openvino:q4_1", "vllm:int8"))
    assert found == {
        "llama.cpp:q4_0": {
            "tpot_ms": 0.5,
            "tpot_ms_rounds": [0.5, 0.5, 1.0],
            "prompt_tokens_per_s": 2.0,
            "output_tokens_per_s": 1.25,
            "output_tokens_per_s_rounds": [1.25],
        },
        "openvino:q4_1": {},
    }


def test_rounds_of_which_some_did_not_count_have_no_ratios() -> None:
    row, other = {"tpot_ms": 4.0, "tpot_ms_rounds": [4.0, 4.0]}, {"tpot_ms": 8.0, "tpot_ms_rounds": [8.0]}
    assert beside(row, {"a:x": other}, ("a:x",)) == {"a:x": {"tpot_ms": 0.5}}


def test_a_table_has_a_line_for_each_peer_and_hides_types_of_a_few_bytes() -> None:
    row = figures(
        measured(10.0, 320.0, 1050.0), LOADS, Held({"Q4_0": 60_000_000, "F32": 90_000}, 100_000_000), [], 20e9
    )
    row |= {"about": "GGUF Q4_0", "beside": {"a:x": {"tpot_ms": 0.5}, "b:y": {}}}
    lines = cells({"diptych:q4_0": row, "a:x": {"file_mb": {"Q4_0": 60.0}}})
    assert lines == [
        ["GGUF Q4_0", "Q4_0 60", "100.0", "10.00", "2.00", "200", "1,050", "-", "a:x", "0.50", "-", "-"],
        [*[""] * 8, "b:y", "-", "-", "-"],
        ["a:x", "Q4_0 60", *["-"] * 10],
    ]
    page = markdown({"diptych:q4_0": row}).splitlines()
    assert page[0] == f"| {' | '.join(COLUMNS)} |"
    assert {line.count("|") for line in page} == {len(COLUMNS) + 1}


def test_a_result_is_shown_as_a_table_of_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = {"a:x": {"file_mb": {"Q4_0": 60.0}, "tpot_ms": 7.25}}
    (tmp_path / "r.json").write_text(json.dumps({"formats": table}))
    assert formats.main(["--show", str(tmp_path / "r.json")]) == 0
    assert capsys.readouterr().out.rstrip() == markdown(table)


def test_a_picture_has_a_bar_for_what_was_measured(tmp_path: Path) -> None:
    rows = {"diptych:q4_0": {"tpot_ms": 7.0, "floor_ms": 5.0}, "llama.cpp:q4_0": {}}
    plot(tmp_path / "p.png", rows, "formats")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--formats=q9"], "known are bf16"),
        (["--peers=vllm"], "known are llama.cpp, openvino"),
        (["--formats=q4_0", "--peers="], "no GGUF file"),
        (["--formats=awq", "--peers=openvino", "--peer-env=openvino=/absent"], "--prepare openvino"),
    ],
)
def test_a_refused_setting_says_what_is_allowed(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert formats.main(["--model=tiny-random", *flags]) == 2
    assert words in capsys.readouterr().err


def test_bytes_are_counted_by_the_types_of_a_file(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    values = torch.randn(4, 64).numpy()
    for number, kind in enumerate((GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0)):
        writer.add_tensor(f"t{number}", quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert bytes_by_type(tmp_path / "m.gguf") == {"Q8_0": 2 * 4 * 2 * 34, "Q4_0": 4 * 2 * 18}
    parts = {"a": torch.zeros(3, 5, dtype=torch.int8), "b": torch.zeros(8, dtype=torch.bfloat16)}
    save_file(parts, tmp_path / "model.safetensors")
    assert bytes_by_type(tmp_path) == {"BF16": 16, "I8": 15}


def test_a_step_reads_fewer_bytes_of_a_quantised_checkpoint(tmp_path: Path) -> None:
    files = resolve_model("tiny-random")
    weights.write_folder(files, tmp_path / "bf16", int8=False)
    checkpoints.write_checkpoint(files, tmp_path / "w8a8", FORMATS["w8a8"].source)
    native = native_backend()
    if native is not None and native.multiplies_bf16:
        assert 0 < bytes_of_a_step(tmp_path / "w8a8", "auto") < bytes_of_a_step(tmp_path / "bf16", "none")
    else:
        assert bytes_of_a_step(tmp_path / "bf16", "none") == 0


def test_inputs_that_are_no_whole_groups_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="160 inputs; these checkpoints have groups of 64"):
        checkpoints.write_checkpoint(resolve_model("tiny-random"), tmp_path / "awq", FORMATS["awq"].source)


@pytest.mark.slow
@pytest.mark.e2e
def test_two_formats_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "cache_folder", lambda: tmp_path / "cache")  # the workers' kernels stay where they are
    flags = "--model=tiny-random --formats=w8a8,fp8-block --peers= --tokens=32 --prompt=16 --streams=2 --repeats=1 "
    output, picture = tmp_path / "f.json", tmp_path / "f.png"
    status = formats.main([*flags.split(), "--diptych-args=--threads 1", f"--output={output}", f"--plot={picture}"])
    found = json.loads(output.read_text())
    assert status == 0
    for name in ("diptych:w8a8", "diptych:fp8-block"):
        row = found["formats"][name]
        assert row["tpot_ms"] > 0 and row["prompt_tokens_per_s"] > 0 and row["output_tokens_per_s"] > 0
        assert row["memory_mib"] > 10
        assert row["beside"] == {}
        assert len(found["engines"][name]["start_s"]) == 1
    assert str(tmp_path) not in output.read_text()
    assert picture.exists()
