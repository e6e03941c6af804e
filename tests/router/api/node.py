"""Runs the parts of pages that need no document, under node."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

from router.api import pages

PROGRAM = shutil.which("node")
DEADLINE_S = 60.0


async def values(files: str, *expressions: str, url: str = "") -> list[Any]:
    """Values of expressions over scripts of pages, each under its capitalised name: "markdown/tree" is `Tree`.

    Expressions are awaited one after another. With `url`, `fetch` asks there.
    """
    assert PROGRAM is not None
    paths = [pages.STATIC / f"{name}.js" for name in files.split()]
    lines = [f"const {path.stem.capitalize()} = require({json.dumps(str(path))});" for path in paths]
    if url:
        lines.append(f"const ask = fetch; globalThis.fetch = (path, options) => ask(new URL(path, '{url}'), options);")
    each = ", ".join(f"async () => ({expression})" for expression in expressions)
    lines.append(f"(async () => {{ for (const one of [{each}]) console.log(JSON.stringify(await one() ?? null)); }})()")
    return [json.loads(line) for line in (await run("-", text="\n".join(lines))).splitlines()]


async def run(program: str | Path, *arguments: str, text: str = "") -> str:
    """The output of a program. Fails with what it says when it fails."""
    assert PROGRAM is not None
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(PROGRAM, program, *arguments, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(DEADLINE_S):
            out, errors = await process.communicate(text.encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    return out.decode()
