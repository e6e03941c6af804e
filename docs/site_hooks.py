"""Hooks of the documentation site: links to files outside docs/ work on the site as they do in the repository.

A page, image or example outside docs/ that a page links to becomes part of the site under `files/`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = "files/"
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")


def path_in_repository(uri: str) -> str:
    """The path of a source of the site, relative to the root of the repository."""
    return uri.removeprefix(OUTSIDE) if uri.startswith(OUTSIDE) else f"docs/{uri}"


def uri_of(path: str) -> str:
    """The inverse of `path_in_repository`."""
    return path.removeprefix("docs/") if path.startswith("docs/") else OUTSIDE + path


def target_of(link: str, page: str) -> str:
    """The path in the repository that a relative link of the page at path `page` leads to."""
    return os.path.normpath(PurePosixPath(page).parent / unquote(link))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that pages link to."""
    pending = [file for file in files if file.is_documentation_page()]
    while pending:
        page = path_in_repository(pending.pop().src_uri)
        for _, link, _ in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
            path = target_of(link, page)
            if path.startswith(("docs/", "..")) or not (ROOT / path).is_file() or uri_of(path) in files.src_uris:
                continue
            added = File.generated(config, uri_of(path), abs_src_path=str(ROOT / path))
            files.append(added)
            if added.is_documentation_page():
                pending.append(added)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links that leave docs/, or that lead back into it."""
    path = path_in_repository(page.file.src_uri)
    folder = PurePosixPath(page.file.src_uri).parent

    def rewrite(link: re.Match[str]) -> str:
        uri = uri_of(target_of(link[2], path))
        return link[0] if uri not in files.src_uris else link[1] + os.path.relpath(uri, folder) + link[3]

    return LINK.sub(rewrite, markdown)
