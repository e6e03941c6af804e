"""The pages for people stand alone."""

from __future__ import annotations

import base64
import hashlib
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
    markup = page.partition("<script>")[0]
    assert not re.search(r"""(src|href)=["'](?!data:|/"|/dashboard")""", markup)
    assert not re.search(r"@import|url\(", markup)


def test_only_the_script_and_the_styles_of_the_page_may_run(page: str) -> None:
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert len(policy) == 1 and "unsafe" not in policy[0] and "require-trusted-types-for 'script'" in policy[0]
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>([\s\S]*?)</{tag}>", page)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy[0]
    assert not re.search(r"""<[^>]+\s(?:style|on\w+)=["']""", page.partition("<script>")[0])


def test_no_text_becomes_markup(page: str) -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b", page)


def test_files_are_short_and_all_of_them_are_used() -> None:
    parts = [file for file in pages.STATIC.rglob("*.*") if file.suffix in (".css", ".js")]
    used = {
        name for html in (pages.CHAT, pages.DASHBOARD) for name in pages.PART.findall((pages.STATIC / html).read_text())
    }
    assert {file.relative_to(pages.STATIC).as_posix() for file in parts} == used
    assert all(len(file.read_text(encoding="utf-8").splitlines()) < 400 for file in parts)


def test_the_script_ends_where_the_page_ends_it(page: str) -> None:
    """A browser reads on past `</script>` when a comment and another script have begun before it."""
    script = page.partition("<script>")[2]
    assert script.count("</script>") == 1 and "<script" not in script


def test_code_of_others_has_its_version_and_its_licence() -> None:
    files = sorted((pages.STATIC / "vendor").glob("*.js"))
    assert files
    for file in files:
        name, version = re.fullmatch(r"([a-z]+)-([\d.]+)(?:\.\w+)*\.js", file.name).groups()  # type: ignore[union-attr]
        assert f"{name} v{version}" in file.read_text(encoding="utf-8")[:200]
        assert (file.parent / f"{name}-{version}.LICENSE").stat().st_size


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
