from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.load.config import BenchConfig
from common.config import (
    CONFIG_CLASSES,
    DecodeWorkerConfig,
    PrefillWorkerConfig,
    RouterConfig,
    describe,
    is_loopback,
    parse_cores,
)
from common.config.field import GROUPS, Config, fields_of, setting, to_argv, to_env
from common.config.sources import counterpart, counterpart_env, load, read, variables_of
from common.errors import ConfigError

DECODE = "tcp://127.0.0.1:7002"


def decode_worker(*argv: str, file: Path | None = None, **environ: str) -> DecodeWorkerConfig:
    argv = (*argv, "--config", str(file)) if file else argv
    return read(DecodeWorkerConfig, argv, environ=environ)


def refusal(argv: Sequence[str] = (), cls: type[Config] = DecodeWorkerConfig, **environ: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read(cls, argv, environ=environ)
    return caught.value


def test_a_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "diptych.toml"
    file.write_text("max_num_seqs = 2\n[decode_worker]\nmax_num_seqs = 3\n")
    assert (decode_worker().max_num_seqs, decode_worker().places) == (0, 64)
    assert decode_worker(file=file).max_num_seqs == 3
    assert decode_worker(file=file, DIPTYCH_MAX_NUM_SEQS="4").max_num_seqs == 4
    assert decode_worker(DIPTYCH_DECODE_MAX_NUM_SEQS="5", DIPTYCH_MAX_NUM_SEQS="4").max_num_seqs == 5
    assert decode_worker("--max-num-seqs=6", file=file, DIPTYCH_DECODE_MAX_NUM_SEQS="5").max_num_seqs == 6


def test_the_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "diptych.toml"
    file.write_text("watermark = 0\n")  # a whole number where a float is expected
    assert decode_worker(DIPTYCH_CONFIG=str(file)).watermark == 0.0


@dataclass(frozen=True)
class ProgramConfig(Config):
    section: ClassVar[str] = "bench"
    env_prefix: ClassVar[str] = "BENCH"

    rate: float = setting(1.0, "requests a second", group="Load", ge=0)


def test_a_program_above_brings_its_own_settings(tmp_path: Path) -> None:
    file = tmp_path / "diptych.toml"
    file.write_text("max_num_seqs = 2\n[bench]\nrate = 3\n")
    assert read(ProgramConfig, [], environ={"DIPTYCH_CONFIG": str(file)}).rate == 3.0
    assert read(ProgramConfig, [], environ={"DIPTYCH_BENCH_RATE": "4", "DIPTYCH_PORT": "1"}).rate == 4.0
    assert refusal([], ProgramConfig, DIPTYCH_BENCH_RAT="4").allowed.endswith("DIPTYCH_BENCH_RATE?")


def test_settings_of_other_processes_are_known_but_not_taken(tmp_path: Path) -> None:
    file = tmp_path / "diptych.toml"
    file.write_text("kv_streams = 4\n[router]\nport = 80\n[bench]\nrate = 2\n")
    config = decode_worker(file=file, DIPTYCH_MAX_RETRIES="1", DIPTYCH_CACHE="/somewhere", DIPTYCH_BENCH_URL="http://x")
    assert config == replace(DecodeWorkerConfig(), config=str(file))


@pytest.mark.parametrize(
    ("argv", "environ", "field", "says"),
    [
        (["--max-num-seqs", "none"], {}, "max_num_seqs", "a whole number from 0 to 4096"),
        (["--max-num-seqs", "-1"], {}, "max_num_seqs", "0 to 4096"),
        (["--block-size", "24"], {}, "block_size", "one of 0, 16, 32, 64, 128"),
        (["--watermark", "nan"], {}, "watermark", "0 to 0.5"),
        (["--port", "65536"], {}, "port", "to 65535"),
        (["--device", "tpu"], {}, "device", "cpu, cuda or cuda:N"),
        (["--kv-transport", "rdma"], {}, "kv_transport", "one of auto, tcp, shm, nixl, cuda-ipc"),
        (["--kv-transport", "cuda-ipc", "--device", "cpu"], {}, "kv_transport", "nixl on a CPU or with --tensor"),
        (
            ["--kv-transport", "cuda-ipc", "--device", "cuda", "--tensor-parallel-size", "2"],
            {},
            "kv_transport",
            "--tensor-parallel-size above 1",
        ),
        (
            ["--kv-transport", "nixl", "--curve-key", "key"],
            {},
            "kv_transport",
            "because NIXL neither encrypts",
        ),
        (["--cores", "3-1"], {}, "cores", "ascending"),
        (["--host", "0.0.0.0"], {}, "host", "--allow-remote"),
        (["--heartbeat-s", "5"], {}, "router_timeout_s", "two heartbeats"),
        (["--max-num-seq", "3"], {}, "--max-num-seq", "--max-num-seqs"),
        (["--max-num"], {}, "--max-num", "unknown option --max-num; did you mean --max-num-seqs?"),
        (["extra"], {}, "extra", "unexpected argument 'extra'"),
        (["--port"], {}, "command line", "option --port needs a value"),
        (["--engine", "vllm", "--engine-args", "'open"], {}, "engine_args", "quoted as in a shell"),
        (["--engine", "sglang"], {}, "engine", "one of diptych, vllm"),
        (["--", "--seed", "1"], {}, "engine_args", "empty without --engine vllm"),
        (["--log-json=1"], {}, "command line", "option --log-json takes no value"),
        (["--no-such-thing"], {}, "--no-such-thing", "decode-worker --help-all lists all options"),
        ([], {"DIPTYCH_MAX_NUM_SEQ": "3"}, "DIPTYCH_MAX_NUM_SEQ", "DIPTYCH_MAX_NUM_SEQS"),
        ([], {"DIPTYCH_LOG_JSON": "perhaps"}, "log_json", "true or false"),
        ([], {"DIPTYCH_CONFIG": "/no/such.toml"}, "config", "No such file"),
    ],
)
def test_a_bad_setting_is_refused(argv: list[str], environ: dict[str, str], field: str, says: str) -> None:
    error = refusal(argv, **environ)
    assert error.field == field
    assert says in error.allowed


@pytest.mark.parametrize(("transport", "device"), [("shm", "cpu"), ("nixl", "cpu"), ("cuda-ipc", "cuda")])
def test_memory_that_others_read_has_no_frames_to_quantise(transport: str, device: str) -> None:
    flags = ["--kv-transport", transport, "--kv-wire-dtype", "fp8", "--device", device]
    error = refusal(flags, PrefillWorkerConfig)
    assert error.field == "kv_wire_dtype" and f"native with --kv-transport {transport}" in error.allowed


def test_blocks_that_are_small_already_are_not_quantised() -> None:
    assert read(PrefillWorkerConfig, ["--kv-wire-dtype", "fp8"], environ={}).kv_wire_dtype == "fp8"
    error = refusal(["--kv-cache-dtype", "fp8", "--kv-wire-dtype", "fp8"], PrefillWorkerConfig)
    assert error.field == "kv_wire_dtype" and "native with --kv-cache-dtype fp8" in error.allowed
    error = refusal(["--kv-cache-dtype", "int8", "--device", "cuda"], DecodeWorkerConfig)
    assert error.field == "kv_cache_dtype" and error.allowed == "auto, native or fp8 on cuda"


@pytest.mark.parametrize(
    ("text", "field", "says"),
    [
        ("max_num_sequences = 3", "max_num_sequences", "max_num_seqs"),
        (
            "[decode_worker]\nkv_streams = 3",
            "decode_worker.kv_streams",
            "unknown setting kv_streams under",
        ),
        ("[decodeworker]\n", "[decodeworker]", "[decode_worker]"),
        ("decode = 1", "decode", "unknown setting decode in"),
        ("max_num_seqs = true", "max_num_seqs", "a whole number"),
        ("max_num_seqs = '3'", "max_num_seqs", "a whole number"),
        ("max_num_seqs = ", "config", "a valid TOML file"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, field: str, says: str) -> None:
    file = tmp_path / "diptych.toml"
    file.write_text(text)
    error = refusal(["--config", str(file)])
    assert error.field == field
    assert says in error.allowed


def test_addresses_come_apart_by_comma_space_and_repetition() -> None:
    argv = ["--decode", "tcp://a:1,tcp://b:1", "tcp://c:1", "--decode", "tcp://d:1", "--prefill=tcp://p:1"]
    config = read(RouterConfig, argv, environ={})
    assert config.decode == ("tcp://a:1", "tcp://b:1", "tcp://c:1", "tcp://d:1")
    assert config.prefill == ("tcp://p:1",)


@pytest.mark.parametrize("argv", [[], ["--decode", "127.0.0.1:7002"], ["--decode", DECODE, "--prefill", DECODE]])
def test_the_router_needs_distinct_addresses(argv: list[str]) -> None:
    assert refusal(argv, RouterConfig).field in ("decode", "prefill")


def test_objects_are_checked_however_they_are_built() -> None:
    with pytest.raises(ConfigError, match="block_size=8: must be one of 0, 16"):
        PrefillWorkerConfig(block_size=8)
    with pytest.raises(ConfigError, match="max_retries"):
        RouterConfig(max_retries=True)


@pytest.mark.parametrize(
    "config",
    [
        DecodeWorkerConfig(enable_prefix_caching=False, log_json=True, kv_memory_gib=0.5, cores="0-1,3", model="a b"),
        RouterConfig(decode=("tcp://a:1", "tcp://b:2"), prefill=("tcp://[::1]:3",), host="0.0.0.0"),
    ],
)
def test_argv_rebuilds_a_config(config: Config) -> None:
    assert read(type(config), to_argv(config), environ={}) == config


def test_a_secret_travels_by_environment_and_is_never_shown() -> None:
    config = RouterConfig(api_key="hush", decode=(DECODE,))
    assert "hush" not in repr(config) + " ".join(to_argv(config))
    assert read(RouterConfig, to_argv(config), environ=to_env(config)) == config


def test_the_other_role_has_the_shared_settings_and_those_of_its_own_that_are_written_down(tmp_path: Path) -> None:
    file = tmp_path / "diptych.toml"
    file.write_text("max_num_seqs = 9\n[prefill_worker]\nkv_lease_s = 7.0\nkv_memory_gib = 3.0\n")
    config = read(
        DecodeWorkerConfig,
        ["--config", str(file), "--kv-memory-gib", "0.5", "--max-num-seqs", "3", "--role-change"],
        environ={},
    )
    environ = {"DIPTYCH_PREFILL_MAX_NUM_BATCHED_TOKENS": "99"}
    other = counterpart(config, PrefillWorkerConfig, environ)
    assert (other.kv_memory_gib, other.config, other.role_change) == (0.5, str(file), True)
    assert (other.max_num_seqs, other.kv_lease_s, other.max_num_batched_tokens) == (9, 7.0, 99)


def test_settings_that_the_other_role_refuses_are_refused_at_start() -> None:
    config = DecodeWorkerConfig(kv_transport="shm", role_change=True)
    with pytest.raises(ConfigError, match="kv_wire_dtype"):
        counterpart(config, PrefillWorkerConfig, {"DIPTYCH_PREFILL_KV_WIRE_DTYPE": "fp8"})


def test_the_settings_of_the_other_role_travel_by_environment() -> None:
    other = DecodeWorkerConfig(max_num_seqs=5, watermark=0.1, kv_memory_gib=0.5)
    mine = PrefillWorkerConfig(kv_memory_gib=0.25, role_change=True)
    found = counterpart(mine, DecodeWorkerConfig, counterpart_env(other))
    assert (found.max_num_seqs, found.watermark, found.kv_memory_gib) == (5, 0.1, 0.25)


def test_load_says_one_line_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(DecodeWorkerConfig, ["--port=x"])
    assert caught.value.code == 2
    expected = "diptych decode-worker: invalid --port x: must be a whole number from 0 to 65535\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("cls", CONFIG_CLASSES)
def test_help_shows_every_flag(cls: type[Config], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(cls, ["--help-all"], environ={})
    shown = capsys.readouterr().out
    for field in fields_of(cls):
        assert (field.shown_flag in shown) is not field.rule.internal


@pytest.mark.parametrize("cls", CONFIG_CLASSES)
def test_the_short_help_has_the_common_options(cls: type[Config], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(cls, ["--help"], environ={})
    shown = capsys.readouterr().out
    for field in fields_of(cls):
        assert bool(re.search(rf"^  {field.flag}\b", shown, re.MULTILINE)) is field.rule.common
    assert len(shown.splitlines()) <= 75 and "--help-all lists all" in shown
    assert all(command in shown for command, _ in cls.examples)


@pytest.mark.parametrize("cls", (*CONFIG_CLASSES, BenchConfig))
def test_help_texts(cls: type[Config]) -> None:
    """One short sentence; a negative flag says what it does."""
    for field in fields_of(cls):
        rule = field.rule
        assert len(rule.help) <= 160 and len(rule.off) <= 160, field.name
        assert not rule.help.endswith(".") and ". " not in rule.help, field.name
        assert not rule.details or rule.details.endswith("."), field.name
        assert bool(rule.off) is (field.default is True), field.name
        if rule.off:
            assert describe(field) == rule.off


def test_an_error_names_where_a_value_came_from(tmp_path: Path) -> None:
    file = tmp_path / "diptych.toml"
    file.write_text("port = 70000\n[router]\nmax_retries = 101\n")
    workers = ["--decode", DECODE]
    environ = {"DIPTYCH_CONFIG": str(file)}
    said = []
    for argv, more in (
        (["--port", "99999"], {}),
        ([], {"DIPTYCH_ROUTER_PORT": "99999"}),
        ([], {"DIPTYCH_PORT": "http"}),
        ([], {}),
        (["--port", "1"], {}),
        (["--port", "1", "--max-retries", "1", "--tls-key", "k"], {}),
        (["--port", "1", "--max-retries", "1", "--curve-authorized", "a b"], {}),
        (["--port", "1", "--max-retries", "1", "--reasoning-start", " <a>", "--reasoning-end", "</a>"], {}),
    ):
        with pytest.raises(ConfigError) as caught:
            read(RouterConfig, [*workers, *argv], environ=environ | more)
        said.append(str(caught.value))
    assert said == [
        "invalid --port 99999: must be 0 to 65535",
        "invalid DIPTYCH_ROUTER_PORT=99999: must be 0 to 65535",
        "invalid DIPTYCH_PORT=http: must be a whole number from 0 to 65535",
        f"invalid port = 70000 in {file}: must be 0 to 65535",
        f"invalid max_retries = 101 under [router] in {file}: must be 0 to 100",
        "missing --tls-cert: must be a file, because --tls-cert and --tls-key belong together",
        "invalid --curve-authorized 'a b': must be empty unless --curve-key is given",
        "invalid --reasoning-start ' <a>': must be a text without white space at its ends",
    ]


def test_a_secret_is_in_no_error() -> None:
    error = refusal(["--api-key", "hush"], SecretConfig)
    assert str(error) == "invalid --api-key ***: must be a word of capitals"


@dataclass(frozen=True)
class SecretConfig(Config):
    api_key: str = setting("", "key", group="Server", secret=True, pattern="[A-Z]*", expects="a word of capitals")


@pytest.mark.parametrize("cls", CONFIG_CLASSES)
def test_every_field_has_help_and_a_group(cls: type[Config]) -> None:
    for field in fields_of(cls):
        assert field.rule.help
        assert field.rule.group in GROUPS


def test_no_environment_name_means_two_things() -> None:
    own: dict[str, Any] = {}
    shared: set[str] = set()
    for cls in CONFIG_CLASSES:
        names = variables_of(cls)
        own |= {name: cls for name, (_, is_own) in names.items() if is_own}
        shared |= {name for name, (_, is_own) in names.items() if not is_own}
    assert not own.keys() & shared
    assert len(own) == sum(len(fields_of(cls)) for cls in CONFIG_CLASSES)


@pytest.mark.parametrize(
    ("host", "answer"), [("localhost", True), ("::1", True), ("127.9.9.9", True), ("10.0.0.1", False)]
)
def test_loopback(host: str, answer: bool) -> None:
    assert is_loopback(host) is answer


def test_cores_are_listed_once() -> None:
    assert parse_cores("0-2,8,1") == (0, 1, 2, 8)
    assert parse_cores("") == ()


def test_a_goal_widens_what_no_flag_bounds() -> None:
    usual, goal = DecodeWorkerConfig(), DecodeWorkerConfig(slo_tpot_ms=20.0)
    given = DecodeWorkerConfig(slo_tpot_ms=20.0, max_num_seqs=9, local_prefill_chunk=40)
    assert (usual.places, usual.step_tokens) == (usual.usual_places, usual.usual_step_tokens) == (64, 128)
    assert (goal.places, goal.step_tokens) == (256, 1024)
    assert (goal.usual_places, goal.usual_step_tokens) == (64, 128)
    assert (given.places, given.step_tokens) == (given.usual_places, given.usual_step_tokens) == (9, 40)
