"""The chat page stands alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


@pytest.fixture
def page(repository: Path) -> str:
    return (repository / "router/static/index.html").read_text(encoding="utf-8")


def test_nothing_is_loaded_from_elsewhere(page: str) -> None:
    assert "default-src 'none'" in page and "connect-src 'self'" in page
    assert not re.search(r"""(src|href)=["'](?!data:|\$\{url\})""", page)
    assert not re.search(r"@import|url\(", page)


def test_every_control_has_a_name(page: str) -> None:
    ids = re.findall(r'<(?:textarea|input|select)[^>]*\bid="([\w-]+)"', page)
    labelled = [
        name
        for name in ids
        if re.search(rf'(<label[^>]*>(?:(?!</label>)[\s\S])*|aria-label="[^"]+"[^>]*)id="{name}"', page)
        or re.search(rf'id="{name}"[^>]*aria-label="[^"]+"', page)
    ]
    assert ids and labelled == ids
