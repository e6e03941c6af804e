"""OpenAI's official client of a running application."""

from __future__ import annotations

from typing import Any

import openai


def client_of(running: Any, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0)
