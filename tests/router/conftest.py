"""What tests of the router share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import answers


@pytest.fixture(scope="session", autouse=True)
def grammars_are_closed() -> Iterator[None]:
    """The process that compiles what tests ask about ends with them."""
    yield
    answers.close()
