"""A headless Chromium, driven over a pair of pipes: its DevTools protocol, without a port, a driver or a package.

Browser ── a JSON object and a zero byte for each command, reply and event ──> Chromium
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
AXE = Path(__file__).with_name("axe-core-4.14.1") / "axe.min.js"
DEADLINE_S = 30.0
LIMIT = 64 * 1024 * 1024
"""Bytes of the longest reply: a picture."""
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--mute-audio",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "ArrowUp": (38, ""), "ArrowDown": (40, ""), "Tab": (9, "")}
FIRST_FREE = 10
"""Above the descriptors 3 and 4, which become Chromium's ends of the pipes."""
BEGIN = "import os, sys; [os.dup2(int(sys.argv[n]), n + 2) for n in (1, 2)]; os.execv(sys.argv[3], sys.argv[3:])"


class PageError(Exception):
    """A script of a test, or what the page threw."""


class Browser:
    """One Chromium with a profile of its own; `close` ends it with all its processes."""

    def __init__(self, process: asyncio.subprocess.Process, commands: int, replies: asyncio.StreamReader) -> None:
        self._process, self._commands, self._replies = process, commands, replies
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._number = 0
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, profile: Path) -> Browser:
        assert PROGRAM is not None
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, FIRST_FREE) for end in (theirs_in, theirs_out)]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-Ic",
            BEGIN,
            *map(str, theirs),
            PROGRAM,
            *FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            pass_fds=theirs,
            start_new_session=True,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        for end in (theirs_in, theirs_out, *theirs):
            os.close(end)
        replies = asyncio.StreamReader(limit=LIMIT)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(replies), os.fdopen(ours_in, "rb", 0))
        return cls(process, ours_out, replies)

    async def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """The result of a command. Raises PageError."""
        self._number += 1
        command: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session:
            command["sessionId"] = session
        reply = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        os.write(self._commands, json.dumps(command).encode() + b"\0")  # short: it fits the pipe
        async with asyncio.timeout(DEADLINE_S):
            return await reply

    async def page(self, url: str, width: int = 1280, height: int = 800, *, dark: bool = False) -> Page:
        """A page in a window of its own, with storage that it shares with other pages of this browser."""
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log"):
            await page.call(f"{domain}.enable")
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await page.call("Emulation.setEmulatedMedia", features=scheme)
        await page.resize(width, height)
        await page.open(url)
        return page

    async def close(self) -> None:
        with contextlib.suppress(PageError, TimeoutError, OSError):
            await self.call("Browser.close")
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            os.close(self._commands)
            await self._reading

    async def _read(self) -> None:
        try:
            while True:
                message = json.loads((await self._replies.readuntil(b"\0"))[:-1])
                if "id" not in message:
                    self._note(message)
                elif "error" in message:
                    self._waiting.pop(message["id"]).set_exception(PageError(str(message["error"])))
                else:
                    self._waiting.pop(message["id"]).set_result(message["result"])
        except asyncio.IncompleteReadError:
            for reply in self._waiting.values():
                if not reply.done():
                    reply.set_exception(PageError("Chromium has ended"))

    def _note(self, event: dict[str, Any]) -> None:
        page = self._pages.get(event.get("sessionId", ""))
        if page is None:
            return
        if event["method"] == "Runtime.exceptionThrown":
            page.problems.append(json.dumps(event["params"]["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["source"] in ("security", "javascript"):
            page.problems.append(event["params"]["entry"]["text"])


class Page:
    """A page, for tests that look at it, click and type. `problems`: what it threw, and what its policy refused."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target
        self.problems: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.call(method, self._session, **params)

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def reload(self) -> None:
        await self.value("window.old = true")
        await self.call("Page.reload")
        await self.until("!window.old && document.readyState === 'complete'")

    async def resize(self, width: int, height: int) -> None:
        narrow = width < 600
        screen: dict[str, Any] = {"width": width, "height": height, "mobile": narrow}
        await self.call("Emulation.setDeviceMetricsOverride", deviceScaleFactor=2 if narrow else 1, **screen)
        await self.call("Emulation.setTouchEmulationEnabled", enabled=narrow)

    async def value(self, expression: str) -> Any:
        """The value of an expression, awaited. Raises PageError with what it threw."""
        done = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in done:
            raise PageError(f"{expression}: {done['exceptionDetails']['exception'].get('description')}")
        return done["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true; with the text of the page when it never is."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    with contextlib.suppress(PageError):  # while a page is loaded it has no such elements
                        if await self.value(f"!!({expression})"):
                            return
                    await asyncio.sleep(0.02)
        except TimeoutError:
            shown = await self.value("document.body.innerText")
            raise AssertionError(f"it never came to: {expression}\n{self.problems}\n{shown}") from None

    async def text(self, selector: str) -> str:
        """What a reader sees of the first element that matches."""
        return str(await self.value(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def click(self, selector: str) -> None:
        """Click the middle of the first element that matches, once nothing lies over it."""
        find = f"document.querySelector({json.dumps(selector)})"
        await self.until(
            f"(() => {{ const one = {find}; one.scrollIntoView({{ block: 'nearest' }}); const box ="
            f" one.getBoundingClientRect();"
            " const top = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);"
            " return box.width && (one.contains(top) || top?.contains(one)); })()"
        )
        box = await self.value(
            f"(() => {{ const b = {find}.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; }})()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def choose(self, selector: str, *files: Path) -> None:
        """Choose files in an input, as its dialog would."""
        root = (await self.call("DOM.getDocument"))["root"]["nodeId"]
        node = (await self.call("DOM.querySelector", nodeId=root, selector=selector))["nodeId"]
        await self.call("DOM.setFileInputFiles", nodeId=node, files=[str(file) for file in files])

    async def press(self, key: str, modifiers: int = 0) -> None:
        code, text = KEYS[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        await self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def picture(self, file: Path, *, whole: bool = False) -> None:
        """Write what is seen as PNG; `whole`: all that scrolling would show."""
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        await asyncio.to_thread(file.write_bytes, base64.b64decode(shot["data"]))

    async def barriers(self) -> list[str]:
        """What axe-core finds of the page as it is: a rule and the elements that break it."""
        await self.value(f"{await asyncio.to_thread(AXE.read_text, 'utf-8')}; null")
        shown = "`${one.id}: ${one.nodes.map((node) => node.html.slice(0, 120) + ' ' + node.failureSummary)}`"
        found: list[str] = await self.value(f"axe.run().then(({{ violations }}) => violations.map((one) => {shown}))")
        return found

    async def close(self) -> None:
        await self._browser.call("Target.closeTarget", targetId=self._target)
