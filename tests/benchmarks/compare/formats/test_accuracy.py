"""Accuracy of formats: likelihoods from a server, ratios and their table, and a run of two formats of a small model."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch

from benchmarks.accuracy import Answer, Reference, Scores
from benchmarks.compare import checkpoints, weights
from benchmarks.compare.engines import Engine
from benchmarks.compare.formats import accuracy
from benchmarks.compare.formats.catalogue import FORMATS
from benchmarks.compare.formats.files import bits_a_weight
from benchmarks.compare.formats.likelihoods import FORCE, PeerScores, next_token, score_server
from benchmarks.compare.formats.loss import COLUMNS, cells, figures, markdown, ratio
from benchmarks.compare.peer import Launch, PeerError, Process
from common.model_files.resolve import resolve_model

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        token = body["logit_bias"][0][0]
        found = {"id": token, "logprob": -token / 10, "top_logprobs": [{"id": (body["prompt"][-1] + 1) % 8}]}
        self.answer({"tokens_evaluated": len(body["prompt"]), "completion_probabilities": [found]})
    def answer(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())
    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def reference() -> Reference:
    """Answers that count up, but for one token of four, and a passage."""
    expected = torch.nn.functional.one_hot(torch.tensor([3, 4]), 8).float()
    other = torch.nn.functional.one_hot(torch.tensor([6, 0]), 8).float()
    return Reference([5, 1, 2, 7], [Answer([1, 2, 3, 4], 2, expected), Answer([5, 6, 0], 1, other)])


def replying(reply: Callable[[httpx.Request], httpx.Response]) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(reply), base_url="http://peer")


def counting(request: httpx.Request) -> httpx.Response:
    """A model that counts up modulo 8, and gives a token a log-likelihood of a tenth of its number."""
    body = json.loads(request.content)
    ((token, force),) = body["logit_bias"]
    assert (body["n_predict"], body["temperature"], force) == (1, 0, FORCE)
    found = {"id": token, "logprob": -token / 10, "top_logprobs": [{"id": (body["prompt"][-1] + 1) % 8}]}
    return httpx.Response(200, json={"tokens_evaluated": len(body["prompt"]), "completion_probabilities": [found]})


def check_counting(scores: PeerScores) -> None:
    assert scores.logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.7])
    assert scores.agreement == 3 / 4


def test_a_server_is_asked_for_every_token_of_passage_and_answers() -> None:
    read: list[int] = []
    check_counting(score_server(replying(counting), reference(), read.append))
    assert sum(read) == sum(map(len, reference().sequences))


def test_a_process_is_started_scored_and_ended(tmp_path: Path) -> None:
    script, ports = tmp_path / "server.py", []
    script.write_text(SERVER)

    def launch(free: list[int]) -> Launch:
        ports.append(free[0])
        url = f"http://127.0.0.1:{free[0]}"
        return Launch(url, (Process("fake", (sys.executable, str(script), str(free[0])), f"{url}/health"),))

    engine = Engine("llama.cpp:q8_0", launch, {})  # type: ignore[arg-type]
    options = Namespace(ready_timeout_s=60.0)
    check_counting(accuracy.peer_scores(engine, reference(), tmp_path, options, lambda _: None))
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{ports[0]}/health", trust_env=False)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (httpx.Response(500, text="no slot"), "500: no slot"),
        (httpx.Response(200, json={"tokens_evaluated": 2}), "no likelihoods"),
        (httpx.Response(200, json={"tokens_evaluated": 2, "completion_probabilities": []}), "no likelihoods"),
    ],
)
def test_an_answer_without_likelihoods_is_shown(reply: httpx.Response, words: str) -> None:
    with pytest.raises(PeerError, match=words):
        next_token(replying(lambda _: reply), [1, 2], 3)


@pytest.mark.parametrize(("evaluated", "token"), [(3, 3), (2, 4)])
def test_an_answer_to_other_tokens_does_not_count(evaluated: int, token: int) -> None:
    found = {"id": token, "logprob": -1.0, "top_logprobs": [{"id": 5}]}
    reply = httpx.Response(200, json={"tokens_evaluated": evaluated, "completion_probabilities": [found]})
    with pytest.raises(PeerError, match=f"read {evaluated} tokens of 2 and chose {token} instead of 3"):
        next_token(replying(lambda _: reply), [1, 2], 3)


def test_a_server_that_has_gone_is_named() -> None:
    def gone(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(PeerError, match="did not answer"):
        next_token(replying(gone), [1], 2)


def test_ratios_of_perplexities_have_errors_over_tokens() -> None:
    floats = torch.tensor([-1.0, -2.0, -3.0, -4.0]).double()
    assert ratio(floats, floats) == {"ratio": 1.0, "error": 0.0}
    assert ratio(floats - math.log(2), floats) == {"ratio": pytest.approx(2.0), "error": pytest.approx(0.0)}
    spread = torch.tensor([0.1, -0.1, 0.1, -0.1]).double()
    found = ratio(floats - spread, floats)
    assert found["ratio"] == pytest.approx(1.0)
    assert found["error"] == pytest.approx(float(spread.std()) / 2, abs=1e-5)


def test_only_our_models_have_a_divergence() -> None:
    logprobs = torch.tensor([-1.0, -1.0]).double()
    both = {"perplexity": pytest.approx(math.e, abs=1e-4), "to_float": {"ratio": 1.0, "error": 0.0}, "agreement": 0.5}
    assert figures(PeerScores(logprobs, 0.5), logprobs) == both
    assert figures(Scores(logprobs, 0.5, 0.25), logprobs) == both | {"divergence": 0.25}


def test_a_format_has_a_line_also_without_a_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = {"perplexity": 31.5, "to_float": {"ratio": 1.01, "error": 0.002}, "agreement": 0.975, "divergence": 0.0031}
    row = {"about": "Q6_K", "bits_a_weight": 6.5625, "exact": one, "served": one | {"perplexity": 32.0}}
    peer = {"llama.cpp": one, "to_peer": {"ratio": 1.016, "error": 0.001}}
    first = ["Q6_K", "6.56", "31.50", "32.00", "1.010 ± 0.002", "97.5%", "97.5%", "0.0031", "0.0031"]
    table = {"q6_k": row | peer, "awq": row}
    assert cells(table) == [[*first, "31.50", "97.5%", "1.016 ± 0.001"], [*first, "-", "-", "-"]]
    (tmp_path / "r.json").write_text(json.dumps({"formats": table}))
    assert accuracy.main(["--show", str(tmp_path / "r.json")]) == 0
    page = capsys.readouterr().out.rstrip()
    assert page == markdown(table)
    assert {line.count("|") for line in page.splitlines()} == {len(COLUMNS) + 1}


@pytest.mark.parametrize("name", FORMATS)
def test_llama_cpp_reads_the_very_file_of_a_format_or_none(name: str) -> None:
    peer = accuracy.peer_of(FORMATS[name])
    if FORMATS[name].source in checkpoints.FORMATS:
        assert peer is None
    else:
        assert peer is not None and peer.startswith("llama.cpp:")


def test_bits_count_scales_and_leave_out_norms_and_embedding(tmp_path: Path) -> None:
    files = resolve_model("tiny-random")
    weights.write_folder(files, tmp_path / "bf16", int8=False)
    checkpoints.write_checkpoint(files, tmp_path / "w8a8", FORMATS["w8a8"].source)
    assert bits_a_weight(tmp_path / "bf16", files) == 16.0
    assert 8.0 < bits_a_weight(tmp_path / "w8a8", files) < 8.5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--formats=q9"], "known are bf16"),
        (["--formats=q4_0"], "no GGUF file"),
        (["--formats=w8a8", "--llama-cpp=/absent", "--model=absent"], "absent"),
    ],
)
def test_a_refused_setting_says_what_is_allowed(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert accuracy.main(["--model=tiny-random", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_two_formats_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "cache_folder", lambda: tmp_path / "cache")
    passage, output = tmp_path / "passage.txt", tmp_path / "a.json"
    passage.write_text("A lamp that burns all night is seen from far away. " * 4)
    monkeypatch.setattr("benchmarks.accuracy.PASSAGE", passage)
    flags = ["--model=tiny-random", "--formats=w8a8,fp8-block", "--tokens=4", f"--output={output}"]
    assert accuracy.main(flags) == 0
    found = json.loads(output.read_text())
    assert found["conditions"]["text_tokens"] == len(passage.read_text())
    assert found["llama.cpp"] == {}
    for name in ("w8a8", "fp8-block"):
        row = found["formats"][name]
        assert 0.0 < row["exact"]["divergence"] < 0.1
        assert row["served"]["to_float"]["ratio"] == pytest.approx(
            row["served"]["perplexity"] / found["float32"]["perplexity"], abs=1e-4
        )
        assert "llama.cpp" not in row
    assert str(tmp_path) not in output.read_text()
