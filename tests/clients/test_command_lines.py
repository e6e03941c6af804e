"""Programs for a terminal: `llm` asks, calls a function and keeps to a schema, `aider` edits a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Client, Service
from .scripted_model import ANSWER, CHANGED, FILE, GREETING, QUESTION, RESULT

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(2400)]

FUNCTION = f'''
def get_weather(city: str) -> str:
    "The weather in a city."
    return "{RESULT} in " + city
'''


@pytest.fixture
def llm(scripted: Service, client_of: Callable[..., Client], tmp_path: Path) -> Client:
    settings = tmp_path / "settings"
    settings.mkdir()
    shared = {"model_name": scripted.model, "api_base": f"{scripted.url}/v1"}
    models = [
        {"model_id": "here", "supports_tools": True, "supports_schema": True, **shared},
        {"model_id": "here-text", "completion": True, **shared},
    ]
    (settings / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML
    (settings / "weather.py").write_text(FUNCTION)
    return client_of("llm", LLM_USER_PATH=str(settings))


def test_llm_asks_streamed_and_whole(llm: Client) -> None:
    assert llm.run("llm", "-m", "here", "Hello").strip() == GREETING
    assert llm.run("llm", "-m", "here", "--no-stream", "Hello").strip() == GREETING
    assert llm.run("llm", "-m", "here-text", "<|greeted-plain|>").strip() == GREETING
    logged = json.loads(llm.run("llm", "logs", "-n", "3", "--json"))
    assert [one["response"] for one in logged] == [GREETING] * 3 and logged[0]["output_tokens"] == 6


def test_llm_calls_a_function(llm: Client, tmp_path: Path) -> None:
    function = str(tmp_path / "settings" / "weather.py")
    said = llm.run("llm", "-m", "here", "--functions", function, QUESTION)
    assert said.strip() == ANSWER
    assert [call["arguments"] for call in calls(llm)] == [{"city": "Paris"}]


def calls(llm: Client) -> list[dict[str, object]]:
    """The calls that `llm` has made, from its log."""
    logged = json.loads(llm.run("llm", "logs", "-n", "0", "--json"))
    return [call for one in logged for call in one.get("tool_calls") or ()]


def test_llm_keeps_to_a_schema(llm: Client) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
    assert json.loads(llm.run("llm", "-m", "here", "--schema", json.dumps(schema), "Hello")) == {"city": "Paris"}


def test_aider_edits_a_file(scripted: Service, client_of: Callable[..., Client]) -> None:
    client = client_of(
        "aider", OPENAI_API_BASE=f"{scripted.url}/v1", LITELLM_LOCAL_MODEL_COST_MAP="True", AIDER_ANALYTICS="false"
    )
    prices = client.home / ".aider" / "caches" / "model_prices_and_context_window.json"
    prices.parent.mkdir(parents=True)
    prices.write_text('{"none": {}}')  # else it looks for them in the network
    file = client.home / FILE
    file.write_text('def greet() -> str:\n    return "Hi"\n')
    quiet = ("--no-git", "--no-pretty", "--no-show-model-warnings", "--no-check-update", "--no-show-release-notes")
    client.run(
        *(
            "aider",
            "--model",
            f"openai/{scripted.model}",
            "--edit-format",
            "whole",
            "--yes-always",
            "--map-tokens",
            "0",
        ),
        *(*quiet, "--message", f"Make the greeting in {FILE} friendlier.", FILE),
    )
    assert file.read_text() == CHANGED
