"""OpenAI's Agents SDK with tools, over a conversation that the router keeps; skipped where it is not installed."""

from __future__ import annotations

from typing import Any

import pytest

from ...sdk import client_of

agents = pytest.importorskip("agents", reason="needs the package openai-agents")

CALL = '<tool_call>\n{"name": "time_in", "arguments": {"city": "Paris"}}\n</tool_call>'
SAID = "It is noon in Paris."


def scripted(running: Any, *texts: str) -> None:
    """The engine's answers, one after the other; it says the last one again and again."""
    engine, left = running.engine, list(texts)
    events = engine._events

    def take_turns(request: Any) -> Any:
        engine.text = left.pop(0) if left else engine.text
        engine.eos_after = len(engine.text)
        return events(request)

    engine._events = take_turns


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_calls_a_tool_and_goes_on(running: Any, streamed: bool) -> None:
    asked: list[str] = []

    def time_in(city: str) -> str:
        """The time in a city."""
        asked.append(city)
        return "noon"

    scripted(running, CALL, SAID, "You are welcome.")
    agents.set_tracing_disabled(True)
    async with client_of(running) as client:
        model = agents.OpenAIResponsesModel(model="tiny-random", openai_client=client)
        tool = agents.function_tool(time_in)
        agent = agents.Agent(name="clock", instructions="Tell the time.", tools=[tool], model=model)

        async def run(text: str, previous: str | None) -> Any:
            if not streamed:
                return await agents.Runner.run(
                    agent, text, previous_response_id=previous, auto_previous_response_id=True
                )
            result = agents.Runner.run_streamed(
                agent, text, previous_response_id=previous, auto_previous_response_id=True
            )
            assert [event async for event in result.stream_events()]
            return result

        first = await run("What time is it?", None)
        assert (first.final_output, asked) == (SAID, ["Paris"])
        second = await run("Thank you.", first.last_response_id)
        assert second.final_output == "You are welcome."
    prompt = bytes(token for token in running.engine.requests[-1].prompt_token_ids if token < 256).decode()
    places = [prompt.index(text) for text in ("Tell the time.", "What time is it?", "noon", SAID, "Thank you.")]
    assert places == sorted(places)
