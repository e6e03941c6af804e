"""What `diptych serve` prints, and which pools it starts, by what its models are served for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.model_files.task import GENERATES, ServedTask, Task
from router.cli.serve.processes import ServePlan, read_plan
from router.cli.serve.serve import pools_for, summary

from .test_serve import models_file


def plan_of(*argv: str) -> ServePlan:
    return read_plan(argv, {}, num_cores=8)


def test_the_summary_shows_tls_and_keys() -> None:
    text = summary(plan_of("--tls-cert", "a.crt", "--tls-key", "a.key", "--api-key-file", "keys.toml"), ["tiny"], 3.21)
    assert "https://127.0.0.1:8000/v1" in text and "$DIPTYCH_API_KEY" in text


def test_the_summary_has_a_curl_that_parses() -> None:
    text = summary(plan_of("--host", "0.0.0.0", "--port", "8123"), ["tiny"], 3.21)
    assert "http://127.0.0.1:8123/v1/chat/completions" in text
    assert json.loads(text.split("-d '")[1].split("'\n")[0])["model"] == "tiny"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "path"), [("embed", "/v1/embeddings"), ("score", "/v1/score")])
def test_a_model_that_generates_no_text_has_no_decode_workers(name: Task, path: str) -> None:
    task, plan = ServedTask(name, "last", 4), plan_of("--prefill", "2", "--decode", "2")
    served = pools_for(plan, [task])
    assert (len(served.prefill), served.decode) == (2, ()) and pools_for(plan, [GENERATES]) == plan
    text = summary(served, ["tiny"], 3.21, task)
    assert (
        f"http://127.0.0.1:8000{path}" in text and "2 prefill + 0 decode" in text and "chat in the browser" not in text
    )
    assert json.loads(text.split("-d '")[1].split("'\n")[0])["model"] == "tiny"
    for flags, why in ((("--prefill", "0"), "prefill=0: must be"), (("--autoscale",), "autoscale=True: must be")):
        with pytest.raises(ConfigError, match=why):
            pools_for(plan_of(*flags), [task])


def test_of_several_models_only_those_that_generate_text_have_decode_workers(tmp_path: Path) -> None:
    plan = plan_of(models_file(tmp_path, "a", "b"))
    served = pools_for(plan, [ServedTask("embed", "last", 4), GENERATES])
    assert [one.model for one in served.prefill] == ["a", "b"] and [one.model for one in served.decode] == ["b"]


def test_several_models_scale_by_themselves_if_all_of_them_generate_text(tmp_path: Path) -> None:
    plan = plan_of(models_file(tmp_path, "a", "b"), "--autoscale")
    assert pools_for(plan, [GENERATES, GENERATES]) == plan
    with pytest.raises(ConfigError, match="must be omitted with --task score"):
        pools_for(plan, [GENERATES, ServedTask("score", "last", 4)])
