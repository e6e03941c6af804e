"""What `common/config/vllm.py` says of vLLM's arguments, compared with vLLM's own parser."""

from __future__ import annotations

from typing import Any

import pytest

from common.config.vllm import OWNED, PIPELINES, SHORT, refusal

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    """Options of vLLM's engine with their actions."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    found: dict[str, Any] = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())._option_string_actions
    return found


def test_every_short_form_is_that_of_its_argument(options: dict[str, Any]) -> None:
    for short, name in SHORT.items():
        assert any(one.startswith(name.rstrip("*")) for one in options[short].option_strings), short
    refused = {name for name in options if not name.startswith("--") and refusal(name)}
    assert refused == set(SHORT)
    assert all(name in options for name in PIPELINES)


def test_nothing_else_is_refused(options: dict[str, Any]) -> None:
    """In particular no argument because its name begins like one that is refused."""
    for name in options:
        positive = f"--{name[5:]}" if name.startswith("--no-") else name
        is_owned = any(positive == one or one.endswith("*") and positive.startswith(one[:-1]) for one in OWNED)
        if name.startswith("--") and name != "--help":
            assert bool(refusal(name)) is is_owned, name
