"""Programs for a terminal: `llm` asks, calls a function and keeps to a schema, `aider` edits a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Client, Service
from .scripted_model import ANSWER, CHANGED, FILE, GREETING, LOST, QUESTION, RESULT

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


def test_codex_asks_and_gets_the_result_of_its_tool(scripted: Service, client_of: Callable[..., Client]) -> None:
    """The scripted call names a tool that Codex does not have, so Codex returns an error, which the model reports."""
    client = client_of("codex")
    settings = client.home / ".codex"
    settings.mkdir()
    (settings / "config.toml").write_text(
        f"""model = "{scripted.model}"
model_provider = "here"
[model_providers.here]
name = "here"
base_url = "{scripted.url}/v1"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
request_max_retries = 0
stream_max_retries = 0
"""
    )
    program = str(client.programs.parent / "node_modules" / ".bin" / "codex")
    before = scripted.answered()
    said = client.run(program, "exec", "--skip-git-repo-check", "--sandbox", "read-only", QUESTION)
    assert LOST in said and scripted.answered() >= before + 2


def test_promptfoo_evaluates_answers(scripted: Service, client_of: Callable[..., Client]) -> None:
    client = client_of("promptfoo", PROMPTFOO_DISABLE_TELEMETRY="1", PROMPTFOO_DISABLE_UPDATE="1")
    options = {"apiBaseUrl": f"{scripted.url}/v1", "temperature": 0, "max_tokens": 100}
    asserts = [{"type": "contains", "value": GREETING}]
    config = {
        "prompts": ["{{said}}"],
        "providers": [{"id": f"openai:chat:{scripted.model}", "config": options}],
        "tests": [{"vars": {"said": said}, "assert": asserts} for said in ("Hello", "Hi")],
    }
    (client.home / "promptfooconfig.json").write_text(json.dumps(config))
    program = str(client.programs.parent / "node_modules" / ".bin" / "promptfoo")
    client.run(program, "eval", "-c", "promptfooconfig.json", "--no-cache", "--no-write", "-o", "found.json")
    found = json.loads((client.home / "found.json").read_text())["results"]["stats"]
    assert (found["successes"], found["failures"], found["errors"]) == (2, 0, 0)


def test_claude_code_asks_and_gets_the_result_of_its_tool(scripted: Service, client_of: Callable[..., Client]) -> None:
    """As Codex: its error for an unknown tool reaches the model."""
    client = client_of(
        "claude-code",
        **{"ANTHROPIC_BASE_URL": scripted.url, "ANTHROPIC_API_KEY": "none", "DISABLE_TELEMETRY": "1"},
        **{"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"},
        **{"ANTHROPIC_MODEL": scripted.model, "ANTHROPIC_SMALL_FAST_MODEL": scripted.model},
    )
    packages = client.programs.parent / "node_modules" / "@anthropic-ai"
    program = str(next(path for path in packages.glob("claude-code-*/claude")))
    said = client.run(program, "-p", QUESTION, "--output-format", "json", "--model", scripted.model)
    assert LOST in json.loads(said)["result"]
