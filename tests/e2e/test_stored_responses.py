"""Stored responses over real processes: a router that is killed, another that shares its file."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from ..rig import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def asked(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny-random", "input": text, "temperature": 0, "max_output_tokens": 8} | fields


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept") / "responses.sqlite3"


def test_what_was_stored_outlives_its_router(system_of: Any, closing: ExitStack, file: Path) -> None:
    """Two routers share a file; one is killed while it makes an answer, and the other one goes on."""
    stack = system_of(routers=2, router_flags=("--response-store", str(file))).stack
    first, second = (
        closing.enter_context(openai.OpenAI(base_url=f"{router.http_url}/v1", api_key="none", max_retries=0))
        for router in stack.routers
    )
    made = first.responses.create(**asked("one"))
    continued = second.responses.create(**asked("two", previous_response_id=made.id))
    assert continued.usage is not None and made.usage is not None
    assert continued.usage.input_tokens > made.usage.input_tokens + 8
    items = first.responses.input_items.list(continued.id, order="asc")
    assert [item.role for item in items] == ["user", "assistant", "user"]  # type: ignore[union-attr]
    long = first.responses.create(
        **asked("three", background=True, max_output_tokens=3000, extra_body={"ignore_eos": True})
    )
    wait_until(lambda: second.responses.retrieve(long.id).status == "in_progress", "it began")
    stack.routers[0].kill()
    wait_until(lambda: second.responses.retrieve(long.id).status == "failed", "its lease ran out")
    failed = second.responses.retrieve(long.id)
    assert failed.error is not None and "stopped before the response was complete" in failed.error.message
    assert second.responses.retrieve(made.id).output_text == made.output_text
    again = second.responses.create(**asked("two", previous_response_id=made.id))
    assert again.output_text == continued.output_text
