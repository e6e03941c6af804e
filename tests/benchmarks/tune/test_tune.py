"""`diptych tune`: which settings are simulated, which one is picked, what is written, and a run on real workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.load.client import ServerError
from benchmarks.load.summary import RequestRecord, summarise
from benchmarks.plan import options as plan_options
from benchmarks.plan.candidate import Candidate, Flags, base_flags
from benchmarks.plan.profile import Phase, drive
from benchmarks.plan.spec import PlanSpec
from benchmarks.plan.trials import Trials
from benchmarks.simulator.world.scenario import Scenario
from benchmarks.stack import StackError, StackSettings
from benchmarks.tune import __main__ as tune
from benchmarks.tune import service
from benchmarks.tune.__main__ import main
from benchmarks.tune.options import build_parser
from benchmarks.tune.report import Tuning, changed_flags, chosen, conclusions, render_config
from benchmarks.tune.schedule import Schedule
from benchmarks.tune.search import Headroom, Predicted, Setting, TuneSearch, refusing_spec
from benchmarks.tune.service import Measured, Service, ServiceOptions, TuneLoad, is_decided
from common.config import DecodeWorkerConfig
from router.cli.serve.processes import read_plan

from ..plan.conftest import Attained, Guesses, make_spec, make_values, trial_of

LISTS = {"local_prefill_threshold": (64, 256), "max_num_batched_tokens": (512, 1024), "max_num_seqs": (16, 32)}
OPTIONS = ServiceOptions("tiny-random", 500.0, 30.0)


def search_of(attained: Attained, spec: PlanSpec, is_over: Callable[[], bool] = lambda: False) -> TuneSearch:
    base = Setting(Candidate(1, 1, base_flags(spec)))
    simulate = trial_of(attained)
    trials, refusing = Trials(spec, simulate=simulate), Trials(refusing_spec(spec), simulate=simulate)
    return TuneSearch(trials, refusing, Guesses(spec), base, is_over=is_over)


def measured(num_good: int, num: int = 100) -> Measured:
    records = [
        RequestRecord(index, 0.0, token_times=[0.1 if index < num_good else 9.0], output_tokens=1, outcome="ok")
        for index in range(num)
    ]
    return Measured(summarise(records, slo_ttft_ms=500.0), 5.0, {}, {})


def test_the_search_climbs_to_the_best_division_and_settings() -> None:
    def attained(num_prefill: int, num_decode: int, flags: Flags, made: Scenario) -> float:
        refuses = made.settings.get("slo_refuse") == "predicted"
        return 0.5 + 0.1 * (flags.max_num_seqs == 32) + 0.1 * (flags.max_num_batched_tokens == 1024) + 0.2 * refuses

    spec = make_spec(search={"seeds": 2, **LISTS})
    best, *_ = search_of(attained, spec).run()
    assert best.setting.changes(spec) == "--max-num-batched-tokens 1024 --max-num-seqs 32 --slo-refuse predicted"
    assert best.setting.candidate.shape == "1P + 1D" and len(best.evidence.trials) == 2
    one_pool, *_ = search_of(lambda num_prefill, *_: 0.9 if not num_prefill else 0.5, spec).run()
    assert one_pool.setting.candidate.shape == "one pool of 2"


def test_differences_that_do_not_count_change_no_setting() -> None:
    spec = make_spec(search={"seeds": 1, **LISTS})
    best, *_ = search_of(lambda p, d, flags, made: 0.9 + 1e-3 * (flags.max_num_seqs == 32), spec).run()
    assert best.setting.changes(spec) == "defaults"


def test_the_base_is_simulated_whatever_the_time() -> None:
    (only,) = search_of(lambda *_: 0.9, make_spec(), is_over=lambda: True).run()
    assert only.setting.candidate.shape == "1P + 1D"


def test_a_search_without_time_for_a_simulation_keeps_what_it_has() -> None:
    spec, num_left = make_spec(search={"seeds": 1, **LISTS}), 2

    def attained(*_: object) -> float:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise TimeoutError
        return 0.9

    search = search_of(attained, spec)
    assert len(search.run()) == 2
    assert search_of(attained, spec).run() == [], "not even the base"
    with pytest.raises(TimeoutError):
        search.headroom(Candidate(2, 2, base_flags(spec)))


@pytest.mark.parametrize("confirms", (True, False))
def test_the_parts_of_a_run_end_in_their_order_within_the_time_limit(confirms: bool) -> None:
    schedule = Schedule(300.0, confirms)
    assert 2 * schedule.load_s < schedule.defaults_end_s < schedule.search_end_s < schedule.headroom_end_s < 300.0
    first_s = schedule.confirmation_end_s(150.0, 2, 50.0)
    last_s = schedule.confirmation_end_s(first_s, 1, 50.0)
    assert last_s - first_s == pytest.approx(first_s - 150.0)
    assert schedule.confirmation_end_s(150.0, 2, 100.0) == last_s, "time for only one"
    assert not confirms or last_s < schedule.headroom_end_s
    assert schedule.confirmation_end_s(299.0, 1, 50.0) == 299.0, "no time is left"


def test_interrupted_requests_count_once_they_have_missed_a_goal() -> None:
    def decided(ended_at: float, *token_times: float, outcome: str = "interrupted", start: float = 1.0) -> bool:
        record = RequestRecord(0, start, token_times=list(token_times), outcome=outcome)
        return is_decided(record, ended_at, ttft_s=0.5, answer_s=2.0)

    assert decided(1.1, 1.1, outcome="ok") and decided(1.1, outcome="http 503")
    assert not decided(1.4) and decided(1.6), "no first token yet"
    assert not decided(2.9, 1.2) and decided(2.9, 1.6) and decided(3.1, 1.2)
    assert not decided(9.0, outcome="", start=0.0), "never sent"


def test_a_trace_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long one takes many seconds, which would be missing from the load."""
    trace, paths, read = tmp_path / "trace.jsonl", list[Path](), service.read_trace
    lines = ({"timestamp": at_ms, "input_length": 500, "output_length": 300, "hash_ids": [0]} for at_ms in (0, 2000))
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(service, "read_trace", lambda path: (paths.append(path), read(path))[1])
    load = TuneLoad(str(trace), speedup=2.0)
    assert load.arrivals(9.0) == [0.0, 1.0] and [row.input_len for row in load.rows()] == [500, 500]
    short = replace(load, max_model_len=400)
    assert [(row.input_len, row.output_len) for row in short.rows()] == [(300, 100)] * 2
    assert short.arrivals(0.5) == [0.0] and paths == [trace]


def test_a_server_that_does_not_answer_holds_no_phase_beyond_its_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ServerError, match="no complete answer within"):
            asyncio.run(drive(url, "m", tuple(range(100)), Phase(2, 8, 1, 0.1), limit_s=0.2))


@pytest.mark.parametrize("error", (TimeoutError("no time left to start workers"), StackError("decode-0 ended\nlog")))
def test_settings_that_are_not_confirmed_are_not_picked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    simulate = trial_of(lambda p, d, flags, made: 0.6 + 0.3 * (flags.max_num_seqs == 8))
    workers = {name: make_values()[name] for name in ("prefill", "decode", "model")}

    def measure(self: Service, setting: Setting, changed: Mapping[str, int], *_: float, fits: bool) -> Measured:
        if not fits:
            raise error
        return replace(measured(80), rate=5.4, workers=workers)

    monkeypatch.setattr(Service, "measure", measure)
    monkeypatch.setattr(tune, "run_trial", lambda made, progress: simulate(made))
    toml = tmp_path / "tuned.toml"
    flags = ["--ttft", "500", "--tpot", "30", "--rate", "5", "--no-progress", "--output", str(toml)]
    assert main(flags) == tune.NOT_MET
    said = capsys.readouterr()
    text = " ".join((said.out + said.err).split())
    assert "at 5 requests/s" in text, "not the rate that happened to arrive"
    assert "The goals are missed: 80.0% of the requests met both, 95% should." in text
    assert "default settings" in text and "The defaults are kept" in text
    assert text.count("Not confirmed: ") == 2 and f"--max-num-seqs 8 ({str(error).splitlines()[0]}" in text
    assert "max_num_seqs" not in tomllib.loads(toml.read_text()).get("decode_worker", {})


def test_too_little_time_for_the_defaults_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object, fits: bool) -> Measured:
        raise TimeoutError("no time left to start workers")

    monkeypatch.setattr(Service, "measure", measure)
    with pytest.raises(SystemExit) as end:
        main(["--ttft", "500", "--tpot", "30", "--no-progress", "--minutes", "1"])
    assert end.value.code == 2 and "no time left to start workers" in capsys.readouterr().err


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
def test_a_signal_ends_the_workers_before_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    stopped = []

    class Interrupted:
        """A stack of which no process is started, and whose service is asked for when the signal arrives."""

        def __init__(self, settings: StackSettings) -> None:
            assert settings.tied

        def __enter__(self) -> Interrupted:
            return self

        def __exit__(self, *_: object) -> None:
            stopped.append(True)

        @property
        def url(self) -> str:
            os.kill(os.getpid(), number)
            time.sleep(60)
            raise AssertionError("not interrupted")

    monkeypatch.setattr(service, "Stack", Interrupted)
    before, output = signal.getsignal(number), tmp_path / "tuned.toml"
    assert main(["--ttft", "500", "--tpot", "30", "--no-progress", "--output", str(output)]) == tune.INTERRUPTED
    assert "interrupted: nothing is written" in capsys.readouterr().out
    assert stopped and not output.exists() and signal.getsignal(number) is before


@pytest.mark.parametrize("option", ("--output", "--json"))
def test_results_that_cannot_be_written_are_refused_before_the_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    def measure(*_: object, **__: object) -> Measured:
        raise AssertionError("measured in vain")

    monkeypatch.setattr(Service, "measure", measure)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "x"):
        with pytest.raises(SystemExit) as end:
            main(["--ttft", "500", "--tpot", "30", "--no-progress", option, str(path)])
        said = capsys.readouterr().err
        assert end.value.code == 2 and f"invalid {option} {path}: must be a file that can be written" in said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_headroom_is_the_largest_load_within_the_goals() -> None:
    def attained(num_prefill: int, num_decode: int, flags: Flags, made: Scenario) -> float:
        return float(made.load.rate <= 6.0 * num_decode)  # the load has 5 requests a second

    spec = make_spec()
    search = search_of(attained, spec)
    one, two = (search.headroom(Candidate(1, num, base_flags(spec))).factor for num in (1, 2))
    assert 1.0 <= one <= 1.2 and 2.0 <= two <= 2.4
    assert search_of(lambda *_: 0.0, spec).headroom(Candidate(1, 1, base_flags(spec))).factor == 0.0


def test_the_pick_is_better_by_more_than_chance_or_the_base() -> None:
    flags = base_flags(make_spec())
    base, other = Setting(Candidate(1, 1, flags)), Setting(Candidate(1, 1, replace(flags, max_num_seqs=8)))
    ranked = [Predicted(other, None)]  # type: ignore[arg-type]
    assert chosen(base, ranked, {base: measured(80), other: measured(84)}, confirms=True) == base
    assert chosen(base, ranked, {base: measured(80), other: measured(97)}, confirms=True) == other
    assert chosen(base, ranked, {base: measured(80)}, confirms=True) == base, "not confirmed"
    assert chosen(base, ranked, {base: measured(80)}, confirms=False) == other, "a prediction"


def test_a_configuration_file_has_what_differs_from_the_defaults() -> None:
    spec = make_spec()
    base = Setting(Candidate(1, 1, base_flags(spec)))
    flags = replace(base.candidate.flags, max_num_seqs=8, local_prefill_threshold=256, max_num_batched_tokens=1024)
    pick = Setting(Candidate(1, 1, flags), refuses=True)
    more = Headroom(replace(pick.candidate, num_decode=2), 2.0)
    none = Headroom(replace(pick.candidate, num_prefill=2), 1.0)
    own = Headroom(pick.candidate, 1.0)
    tuning = Tuning(spec, OPTIONS, [], {pick: measured(99)}, {}, pick, ("decode compute", 0.9), (own, none, more), 5.0)
    said = "\n".join(conclusions(tuning))
    assert "Binding resource: decode compute, used 90%" in said and "up to about 5 requests/s" in said
    assert "prefill worker: no higher load" in said and "decode worker: the goals would be met up to about 10" in said
    assert changed_flags(spec, base) == {}
    found = {
        "serve": {"prefill": 1, "decode": 1},
        "router": {
            "slo_ttft_ms": 500.0,
            "slo_tpot_ms": 30.0,
            "slo_refuse": "predicted",
            "local_prefill_threshold": 256,
        },
        "prefill_worker": {"max_num_batched_tokens": 1024},
        "decode_worker": {"slo_tpot_ms": 30.0, "max_num_seqs": 8},
    }
    of_model = {"model": 'C:\\"ü"', "dtype": "float32", "quantization": "int8", "kv_memory_gib": 0.5}
    assert tomllib.loads(render_config(replace(tuning, options=replace(OPTIONS, **of_model)))) == of_model | found
    running = replace(OPTIONS, url="http://127.0.0.1:8000")
    assert tomllib.loads(render_config(replace(tuning, options=running))) == found, "its model is not known"


def test_a_configuration_file_makes_serve_start_what_was_measured(tmp_path: Path) -> None:
    spec = make_spec()
    base = Setting(Candidate(1, 1, base_flags(spec)))
    options = replace(OPTIONS, dtype="bfloat16", quantization="int8", kv_memory_gib=0.5)
    tuning = Tuning(spec, options, [], {base: measured(99)}, {}, base, ("decode compute", 0.9), (), 5.0)
    (path := tmp_path / "tuned.toml").write_text(render_config(tuning))
    plan = read_plan(["--config", str(path)], {}, num_cores=2, num_gpus=0)
    assert (len(plan.prefill), len(plan.decode), plan.router.model) == (1, 1, "tiny-random")
    for config in (*plan.prefill, *plan.decode):
        assert (config.model, config.dtype, config.quantization) == ("tiny-random", "bfloat16", "int8")
        assert config.kv_memory_gib == 0.5


@pytest.mark.parametrize(
    ("flags", "message"),
    (
        (("--tpot", "30"), "--ttft"),
        (("--ttft", "0", "--tpot", "30"), "invalid --ttft 0"),
        (("--ttft", "9", "--tpot", "9", "--input-len", "9-2"), "invalid --input-len"),
        (("--ttft", "9", "--tpot", "9", "--load", "x", "--rate", "2"), "rate"),
        (("--ttft", "9", "--tpot", "9", "--url", "http://127.0.0.1:9"), "http://127.0.0.1:9"),
    ),
)
def test_bad_input_ends_with_2(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit) as end:
        main([*flags, "--no-progress"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and message in said


def test_workers_hold_the_model_as_those_of_serve_do() -> None:
    worker = DecodeWorkerConfig()
    for options in (
        build_parser().parse_args(["--ttft", "9", "--tpot", "9"]),
        plan_options.build_parser().parse_args([]),
    ):
        assert (options.dtype, options.quantization) == (worker.dtype, worker.quantization)


def test_the_api_key_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_API_KEY", "secret")
    assert build_parser().parse_args(["--ttft", "9", "--tpot", "9"]).api_key == "secret"
    assert plan_options.build_parser().parse_args([]).api_key == "secret"


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_real_workers_are_tuned(tmp_path: Path) -> None:
    """Starts workers up to three times: minutes on a busy machine."""
    toml, result = tmp_path / "tuned.toml", tmp_path / "tuned.json"
    flags = ["--ttft", "2000", "--tpot", "200", "--rate", "4", "--input-len", "64", "--output-len", "8"]
    flags += ["--dtype", "float32", "--kv-memory-gib", "0.05", "--minutes", "3", "--no-progress"]
    assert main(["tiny-random", *flags, "--output", str(toml), "--json", str(result)]) == 0
    assert tomllib.loads(toml.read_text())["router"]["slo_ttft_ms"] == 2000.0
    found = json.loads(result.read_text())
    assert len(found["measured"]) >= 2, found["unconfirmed"]
    assert len(found["measured"]) + len(found["unconfirmed"]) == 3
