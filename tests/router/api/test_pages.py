"""The pages for people stand alone."""

from __future__ import annotations

import re

import pytest

from router.api import pages


@pytest.fixture(params=[pages.CHAT, pages.DASHBOARD])
def page(request: pytest.FixtureRequest) -> str:
    return pages.page(request.param)


def test_every_part_is_put_in(page: str) -> None:
    assert "@" not in re.sub(r"@(?:media|keyframes)", "", page.partition("</style>")[0])
    assert "--accent:" in page and "/* @" not in page


def test_nothing_is_loaded_from_elsewhere(page: str) -> None:
    assert "default-src 'none'" in page and "connect-src 'self'" in page
    assert not re.search(r"""(src|href)=["'](?!data:|\$\{url\}|/"|/dashboard")""", page)
    assert not re.search(r"@import|url\(", page)


def test_every_control_has_a_name(page: str) -> None:
    ids = re.findall(r'<(?:textarea|input|select)[^>]*\bid="([\w-]+)"', page)
    labelled = [
        name
        for name in ids
        if re.search(rf'(<label[^>]*>(?:(?!</label>)[\s\S])*|aria-label="[^"]+"[^>]*)id="{name}"', page)
        or re.search(rf'id="{name}"[^>]*aria-label="[^"]+"', page)
        or re.search(rf'<label for="{name}"', page)
    ]
    assert ids and labelled == ids
