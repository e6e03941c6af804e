"""A browser for the pages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ..application import Start
from .chromium import Browser


@pytest.fixture
async def browser(start: Start, tmp_path: Path) -> AsyncIterator[Browser]:
    """A Chromium; it ends before the routers, which wait for the end of their connections."""
    one = await Browser.start(tmp_path / "profile")
    yield one
    await one.close()
