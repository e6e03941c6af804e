"""lm-eval over local data: likelihoods, accuracies, perplexity and answers are those that transformers computes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.model_files.resolve import resolve_model
from common.model_files.tokenizer import Tokenizer

from ..e2e.conftest import Oracle, gguf_oracle
from .conftest import Client, Service
from .scripted_model import GREETING

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(2400)]

TASKS = Path(__file__).with_name("tasks")
MODELS = ("tiny-random", "smollm2-135m")
ATOL = {"tiny-random": 1e-3, "smollm2-135m": 2e-2}  # of the sum over a text's tokens
ANSWER_TOKENS, STOP = 12, "\n\n"


class Truth:
    """What transformers says: log-likelihoods of texts, and greedy answers."""

    def __init__(self, model: str) -> None:
        files = resolve_model(model)
        self.tokenizer = Tokenizer.from_file(files.tokenizer)
        self.begin = self.tokenizer.token_to_id(files.bos_token)
        assert self.begin is not None
        self.oracle = gguf_oracle(model) if files.weights[0].suffix == ".gguf" else self._of_folder(files.weights[0])

    @staticmethod
    def _of_folder(weights: Path) -> Oracle:
        from transformers import AutoModelForCausalLM

        return Oracle(AutoModelForCausalLM.from_pretrained(weights.parent, dtype=torch.float32))

    def likelihood(self, context: list[int], text: str) -> float:
        """Of the tokens of `text` behind those of a context."""
        tokens = context + self.tokenizer.encode(text)
        logprobs = self.oracle.logprobs(tokens)
        return sum(float(logprobs[i - 1, tokens[i]]) for i in range(len(context), len(tokens)))

    def answer(self, text: str) -> str:
        tokens = self.oracle.greedy(self.tokenizer.encode(text), ANSWER_TOKENS)
        return str(self.tokenizer.decode(tokens)).split(STOP)[0]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module", params=MODELS)
def truth(request: pytest.FixtureRequest) -> Iterator[tuple[str, Truth]]:
    yield request.param, Truth(request.param)


def tasks_in(folder: Path, answers: dict[str, str]) -> Path:
    """The tasks, with the texts to go on with and their answers."""
    folder.mkdir()
    for source in TASKS.iterdir():
        (folder / source.name).write_text(source.read_text(encoding="utf-8").replace("FOLDER", str(folder)))
    rows = [json.dumps({"text": text, "answer": answer}) for text, answer in answers.items()]
    (folder / "generation.jsonl").write_text("\n".join(rows))
    return folder


def results_of(client: Client) -> Path:
    (path,) = (client.home / "out").glob("*/results_*.json")
    return path


@pytest.fixture
def found(
    truth: tuple[str, Truth], serve: Callable[[str], Service], client_of: Callable[..., Client], tmp_path: Path
) -> dict[str, Any]:
    """What lm-eval reports of all three tasks, and its samples, by task."""
    model, true = truth
    beginnings = [line["text"][:40] for line in lines_of(TASKS / "text.jsonl")]
    folder = tasks_in(tmp_path / "tasks", {text: true.answer(text) for text in beginnings})
    service, client = serve(model), client_of("lm-eval")
    settings = "tokenizer_backend=remote,tokenized_requests=False,num_concurrent=4"
    client.run(
        *("lm_eval", "run", "--model", "local-completions", "--include_path", str(folder), "--output_path", "out"),
        *("--model_args", f"base_url={service.url}/v1/completions,model={model},{settings}", "--log_samples"),
        *("--tasks", "local_choice,local_text,local_generation"),
    )
    results = results_of(client)
    samples = {path.name.split("_2")[0]: lines_of(path) for path in results.parent.glob("samples_*.jsonl")}
    return {"results": json.loads(results.read_text())["results"], **samples}


def test_all_three_kinds_of_tasks(truth: tuple[str, Truth], found: dict[str, Any]) -> None:
    model, true = truth
    check_choices(true, found["results"]["local_choice"], found["samples_local_choice"], ATOL[model])
    check_perplexity(true, found["results"]["local_text"], found["samples_local_text"], ATOL[model])
    assert found["results"]["local_generation"]["exact_match,none"] == 1.0
    if model == "smollm2-135m":
        assert found["results"]["local_choice"]["acc,none"] >= 0.7, "it knows more than chance"


def check_choices(true: Truth, results: dict[str, Any], samples: list[dict[str, Any]], atol: float) -> None:
    """Each choice is as likely as it is, and so the accuracies are those of the likeliest, by sum and by byte."""
    right = right_by_byte = 0
    assert len(samples) == len(lines_of(TASKS / "choice.jsonl"))
    for sample in samples:
        doc = sample["doc"]
        context = true.tokenizer.encode(doc["question"])
        expected = [true.likelihood(context, f" {choice}") for choice in doc["choices"]]
        assert [float(response[0][0]) for response in sample["resps"]] == pytest.approx(expected, abs=atol)
        by_byte = [value / len(choice.encode()) for value, choice in zip(expected, doc["choices"], strict=True)]
        right += expected.index(max(expected)) == doc["answer"]
        right_by_byte += by_byte.index(max(by_byte)) == doc["answer"]
    assert results["acc,none"] == pytest.approx(right / len(samples))
    assert results["acc_norm,none"] == pytest.approx(right_by_byte / len(samples))


def check_perplexity(true: Truth, results: dict[str, Any], samples: list[dict[str, Any]], atol: float) -> None:
    """The whole text counts, its first token behind the one that begins texts."""
    total, num_bytes = 0.0, 0
    for sample in samples:
        text = sample["doc"]["text"]
        expected = true.likelihood([true.begin], text)
        assert float(sample["resps"][0][0]) == pytest.approx(expected, abs=atol)
        total, num_bytes = total + expected, num_bytes + len(text.encode())
    assert results["byte_perplexity,none"] == pytest.approx(math.exp(-total / num_bytes), rel=1e-3)


def test_a_conversation(scripted: Service, client_of: Callable[..., Client], tmp_path: Path) -> None:
    folder = tasks_in(tmp_path / "tasks", dict.fromkeys(("Hello", "Good morning"), GREETING))
    client = client_of("lm-eval")
    client.run(
        *("lm_eval", "run", "--model", "local-chat-completions", "--include_path", str(folder), "--output_path", "out"),
        *("--model_args", f"base_url={scripted.url}/v1/chat/completions,model={scripted.model},num_concurrent=2"),
        *("--apply_chat_template", "--tasks", "local_generation"),
    )
    assert json.loads(results_of(client).read_text())["results"]["local_generation"]["exact_match,none"] == 1.0
