"""The pages for people stand alone."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

import pytest

from router.api import pages

PAGES = (pages.CHAT, pages.DASHBOARD, pages.DOCS)


def _content(page: str, tag: str) -> str:
    (content,) = re.findall(rf"<{tag}>([\s\S]*?)</{tag}>", page)
    return str(content)


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest) -> str:
    return pages.page(request.param)


def test_every_part_is_put_in(page: str) -> None:
    assert "/* @" not in page and not re.search(r'="@(?:policy|integrity)', page)


def test_nothing_is_loaded_from_elsewhere(page: str) -> None:
    assert "default-src 'none'" in page and "connect-src 'self'" in page
    markup = page.partition("<script>")[0]
    assert not re.search(r"""(src|href)=["'](?!data:|/"|/dashboard"|/docs"|/static/)""", markup)
    assert not re.search(r"""@import|url\((?!["']?data:|/static/)""", markup)


def test_only_the_script_and_the_styles_of_the_page_may_run(page: str) -> None:
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert len(policy) == 1 and "unsafe" not in policy[0]
    assert ("require-trusted-types-for 'script'" in policy[0]) is ("/static/swagger-ui-" not in page)
    assert set(re.findall(r"(?:script|style)-src ([^;]*)", policy[0])[0].split()) == {
        f"'{one}'" for one in (*re.findall(r'integrity="([^"]+)"', page), _hash(_content(page, "script")))
    }
    for tag in ("script", "style"):
        assert f"{tag}-src '{_hash(_content(page, tag))}'" in policy[0]
    assert not re.search(r"""<[^>]+\s(?:style|on\w+)=["']""", page.partition("<script>")[0])


def test_no_text_becomes_markup(page: str) -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b", page)


def test_files_are_short_and_all_of_them_are_used() -> None:
    parts = [file for file in pages.STATIC.rglob("*.*") if file.suffix in (".css", ".js")]
    texts = [(pages.STATIC / html).read_text() for html in PAGES]
    used = {name for text in texts for name in pages.PART.findall(text)}
    used |= {f"vendor/{name}" for text in texts for name in pages.LOADED.findall(text)}
    assert {file.relative_to(pages.STATIC).as_posix() for file in parts} == used
    ours = [file for file in parts if not file.is_relative_to(pages.VENDOR)]
    assert all(len(file.read_text(encoding="utf-8").splitlines()) < 400 for file in ours)


def test_the_script_ends_where_the_page_ends_it(page: str) -> None:
    """A browser reads on past `</script>` when a comment and another script have begun before it."""
    script = page.partition("<script>")[2]
    assert page.count("<script") == 1 + page.count('integrity="sha256-')
    assert script.count("</script>") == 1 and "<script" not in script


def test_code_of_others_has_its_version_and_its_licence() -> None:
    folders = sorted(pages.VENDOR.iterdir())
    assert folders and all(re.fullmatch(r"[a-z-]+-\d+\.\d+\.\d+", folder.name) for folder in folders)
    for folder in folders:
        assert (folder / "LICENSE").stat().st_size
        scripts = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.js"))
        assert folder.name.rpartition("-")[2] in scripts


async def test_what_pages_load_needs_no_key_and_may_be_kept(start: Any) -> None:
    running = await start(api_key="the-only-key")
    wanted = {path: pages.library(path) for path in pages.LIBRARIES if path.endswith(("bundle.js", "ular.woff2"))}
    unknown = ("marked-18.2.1/LICENSE", "%2e%2e/chat/page.js", "")
    for path, content in (wanted | dict.fromkeys(unknown)).items():
        reply = await running.http.get(f"/static/{path}")
        assert (reply.status_code, reply.content if content else None) == (200 if content else 404, content), path
        assert not content or "immutable" in reply.headers["cache-control"]


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
