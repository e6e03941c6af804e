"""The chat page in a real browser, over a real router. Needs Chromium."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import Unavailable

from . import chromium

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.PROGRAM is None, reason="Chromium is not installed (apt-get install chromium)"),
]
ANSWER = (
    '# Title\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint(1)\n```\n\n<img src=x onerror="window.hit = 1">'
)
SENT, DONE = "document.querySelector('.turn')", "document.getElementById('send').textContent === 'Send'"
HAS_MODEL = "document.getElementById('model').value === 'tiny-random'"
KEY = "a-key-of-sixteen-or-more"


async def opened(browser: chromium.Browser, running: Any, **how: Any) -> chromium.Page:
    page = await browser.page(running.url, **how)
    await page.until(HAS_MODEL)
    return page


async def say(page: chromium.Page, text: str) -> None:
    await page.click("#prompt")
    await page.type(text)
    await page.press("Enter")


def answering(tools: Any, text: str, **more: Any) -> Any:
    return tools.Engine(text=text, eos_after=len(text), **more)


async def test_an_answer_is_drawn_from_its_markdown_with_its_times(browser: Any, start: Any, tools: Any) -> None:
    running = await start(answering(tools, ANSWER))
    page = await opened(browser, running)
    await say(page, "Show me")
    await page.until(f"{SENT} && {DONE}")
    shown = await page.value(
        "[...document.querySelectorAll('.answer :is(h3, td, pre code, .code-head span)')].map((one) => one.innerText)"
    )
    assert shown == ["Title", "1", "2", "python", "print(1)"]
    assert await page.value("[!document.querySelector('.answer img'), window.hit ?? null]") == [True, None]
    assert "<img src=x" in await page.text(".answer")
    foot = await page.text(".foot")
    assert all(name in foot for name in ("TTFT", "tokens/s", f"{len(ANSWER) + 1} tokens", "total", "prompt"))
    assert page.problems == []


async def test_the_policy_lets_nothing_else_run(browser: Any, start: Any) -> None:
    page = await opened(browser, await start())
    with pytest.raises(chromium.PageError, match="TrustedHTML"):
        await page.value("document.body.innerHTML = '<b>x</b>'")
    with pytest.raises(chromium.PageError, match="TrustedScript"):
        await page.value("document.body.setAttribute('onclick', 'window.hit = 1')")
    assert await page.value("fetch('http://127.0.0.2:9/').then(() => 'reached', (error) => error.name)") == "TypeError"


async def test_stop_retry_and_the_answers_of_a_turn(browser: Any, start: Any, tools: Any) -> None:
    engine = answering(tools, "The first answer.", hold_after=9)
    running = await start(engine)
    page = await opened(browser, running)
    await say(page, "Go on")
    await page.until("document.querySelector('.answer')?.innerText.includes('The fir')")
    assert await page.text("#send") == "Stop"
    await page.press("Escape")
    await page.until(DONE)
    assert "stopped" in await page.text(".foot")
    await tools.until(lambda: engine.aborted)
    engine.hold_after, engine.text, engine.eos_after = -1, "Another.", len("Another.")
    await page.click("[data-do=retry]")
    await page.until(f"{DONE} && document.querySelector('.answer').innerText.includes('Another.')")
    assert "2 of 2" in await page.text(".foot")
    await page.click("[data-do=answer-before]")
    await page.until("document.querySelector('.answer').innerText.includes('The fir')")
    assert len(engine.requests) == 2


async def test_an_edited_message_is_a_branch_and_the_other_is_kept(browser: Any, start: Any, tools: Any) -> None:
    engine = answering(tools, "Yes.")
    page = await opened(browser, await start(engine))
    for number, text in enumerate(("first", "second"), 1):
        await say(page, text)
        await page.until(f"{DONE} && document.querySelectorAll('.answer').length === {number}")
    await page.click("[data-turn='0'] [data-do=edit]")
    assert "The present version is kept." in await page.text(".editor")
    await page.type(" but better")
    await page.press("Enter")
    await page.until(f"{DONE} && document.querySelectorAll('.turn').length === 1 && document.querySelector('.foot')")
    assert "first but better" in await page.text(".mine") and "2 of 2" in await page.text(".mine-buttons")
    assert len(engine.requests[2].prompt_token_ids) < len(engine.requests[1].prompt_token_ids)
    await page.click("[data-do=branch-before]")
    await page.until("document.querySelectorAll('.turn').length === 2")
    assert "better" not in await page.text(".mine")
    await page.reload()
    await page.until(f"{HAS_MODEL} && document.querySelectorAll('.turn').length === 2")
    assert "1 of 2" in await page.text(".mine-buttons")
    await page.click("[data-do=branch-after]")
    await page.until("document.querySelectorAll('.turn').length === 1")
    await page.value("document.getElementById('prompt').focus()")
    await page.press("ArrowUp")
    await page.until("document.activeElement.closest('.editor')")
    await page.press("Escape")
    await page.until("document.activeElement.id === 'prompt'")


async def test_conversations_outlive_the_page_and_can_be_deleted_and_undone(
    browser: Any, start: Any, tools: Any
) -> None:
    running = await start(answering(tools, "Yes."))
    page = await opened(browser, running)
    await say(page, "The first")
    await page.until(f"{SENT} && {DONE}")
    await page.click("#new")
    await say(page, "The second")
    await page.until(f"{SENT} && {DONE}")
    await page.reload()
    await page.until(HAS_MODEL)
    titles = "[...document.querySelectorAll('#sidebar .title')].map((one) => one.textContent)"
    assert await page.value(titles) == ["The second", "The first"]
    assert "The second" in await page.text(".mine") and "Yes." in await page.text(".answer")
    other = await opened(browser, running)  # another tab with the same storage
    await page.click("#sidebar li:last-child .open")
    assert "The first" in await page.text(".mine")
    await page.click("#sidebar li:last-child [data-do=delete]")
    await page.until("!document.querySelector('.turn')")
    await other.until(f"{titles}.length === 1")
    await page.click("#undo")
    await page.until("document.querySelector('.mine')?.innerText.includes('The first')")
    await other.until(f"{titles}.length === 2")
    assert page.problems == other.problems == []


async def test_an_answer_goes_on_while_another_conversation_is_shown(browser: Any, start: Any, tools: Any) -> None:
    engine = answering(tools, "The whole answer.", hold_after=9)
    page = await opened(browser, await start(engine))
    await say(page, "Go on")
    await page.until("document.querySelector('.answer')?.innerText.includes('The who')")
    await page.click("#new")
    await page.until("!document.querySelector('.turn')")
    assert "●" in await page.text("#sidebar")
    engine.go.set()
    await page.until("!document.getElementById('sidebar').innerText.includes('●')")
    assert await page.value("document.querySelector('.turn')") is None
    await page.click("#sidebar .open")
    assert "The whole answer." in await page.text(".answer")


async def test_code_is_copied_and_a_conversation_saved(browser: Any, start: Any, tools: Any, tmp_path: Path) -> None:
    page = await opened(browser, await start(answering(tools, "```js\nlet a = 1;\n```")))
    await browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    await browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path / "saved"))
    await say(page, "Show me")
    await page.until(f"{SENT} && {DONE}")
    label = "document.querySelector('[data-do=copy-code]').innerText"
    await page.click("[data-do=copy-code]")
    await page.until(f"{label} === 'Copied'")
    assert await page.value("navigator.clipboard.readText()") == "let a = 1;"
    await page.value("navigator.clipboard.writeText('other')")
    await page.until(f"{label} === 'Copy'")
    await page.value(
        "window.plain = navigator.clipboard, Object.defineProperty(navigator, 'clipboard', { value: undefined })"
    )
    await page.click("[data-do=copy-code]")  # as on a page without https
    await page.until(f"{label} === 'Copied'")
    assert await page.value("window.plain.readText()") == "let a = 1;"
    await page.click("#sidebar [data-do=export]")
    saved = tmp_path / "saved" / "show-me.md"
    await tools.until(lambda: saved.exists() and saved.stat().st_size)  # it is empty at first
    wanted = "# Show me\n\n## Question\n\nShow me\n\n## Answer (tiny-random)\n\n```js\nlet a = 1;\n```\n"
    assert saved.read_text() == wanted


async def test_settings_are_kept_and_sent(browser: Any, start: Any, tools: Any) -> None:
    engine = answering(tools, "Yes.")
    page = await opened(browser, await start(engine))
    await page.click("#open-settings")
    for name, text in {"system": "Be brief.", "seed": "11", "top-p": "0.5", "stop": "END"}.items():
        await page.value(f"document.getElementById('{name}').focus()")
        await page.type(text)
    await page.click("#save-preset")
    assert await page.value("document.getElementById('preset').value") == "Be brief."
    await page.press("Escape")
    note = "const ask = fetch; window.fetch = (path, how) => { window.sent = how.body; return ask(path, how); };"
    await page.call("Page.addScriptToEvaluateOnNewDocument", source=note)
    await page.reload()
    await page.until(HAS_MODEL)
    await say(page, "Hi")
    await page.until(f"{SENT} && {DONE}")
    params = engine.requests[0].params
    assert (params.seed, params.top_p) == (11, 0.5)
    sent = json.loads(await page.value("window.sent"))
    assert sent.keys() == {"model", "messages", "top_p", "seed", "stop", "stream", "stream_options"}
    assert b"Be brief." in bytes(token for token in engine.requests[0].prompt_token_ids if token < 256)
    await page.click("#open-settings")
    await page.click("#reset")
    assert await page.value("['system', 'seed', 'stop'].map((id) => document.getElementById(id).value)") == ["", "", ""]


async def test_a_service_with_a_key_asks_for_it_and_a_busy_one_is_waited_for(
    browser: Any, start: Any, tools: Any
) -> None:
    engine = answering(tools, "Yes.", full=Unavailable("4 requests wait, 4 may.", retry_after_s=2.0))
    page = await browser.page((await start(engine, api_key=KEY)).url)
    await page.until("!document.getElementById('unlock').hidden")
    await page.type("wrong-key-of-sixteen")
    await page.press("Enter")
    await page.until("document.getElementById('unlock-title').innerText.includes('rejected')")
    await page.type(KEY)
    await page.press("Enter")
    await page.until(HAS_MODEL)
    await say(page, "Hi")
    await page.until("document.querySelector('.waiting')?.innerText.includes('4 requests wait, 4 may. Retrying in')")
    engine.full = None
    await page.until("document.querySelector('.answer')?.innerText.includes('Yes.')")


async def test_a_refusal_is_shown_in_the_words_of_the_api(browser: Any, start: Any, tools: Any) -> None:
    running = await start(answering(tools, "Yes.", max_model_len=64))
    page = await opened(browser, running)
    await say(page, "word " * 200)
    await page.until("document.querySelector('.turn .error')")
    said = (await running.chat(messages=[{"role": "user", "content": ("word " * 200).strip()}], max_tokens=1024)).json()
    shown = await page.text(".turn .error")
    assert said["error"]["message"] in shown and "HTTP 400" in shown and "Try again" not in shown


async def test_the_picker_offers_every_model_and_remembers(browser: Any, start: Any) -> None:
    page = await opened(browser, await start())
    two = json.dumps({"data": [{"id": "tiny-random", "ready": False}, {"id": "other", "max_model_len": 8192}]})
    models = f"Promise.resolve(new Response('{two}'))"
    script = f"const ask = fetch; window.fetch = (path, how) => path === '/v1/models' ? {models} : ask(path, how);"
    await page.call("Page.addScriptToEvaluateOnNewDocument", source=script)
    await page.reload()
    await page.until("!document.getElementById('model').disabled")
    choose = "one.value = 'other'; one.dispatchEvent(new Event('change'));"
    await page.value(f"((one) => {{ {choose} }})(document.getElementById('model'))")
    await page.reload()
    await page.until("document.getElementById('model').value === 'other'")
    assert "8,192 tokens" in await page.value("document.getElementById('model').title")
    assert await page.text("#model option") == "tiny-random (not ready)"


@pytest.mark.parametrize("dark", [False, True])
async def test_a_phone_has_room_for_all_of_it(browser: Any, start: Any, tools: Any, dark: bool) -> None:
    wide = "```\n" + "x" * 300 + "\n```\n\n|" + "a long head|" * 9 + "\n|" + "---|" * 9 + "\n\n" + "y" * 200
    page = await opened(browser, await start(answering(tools, wide)), width=390, height=844, dark=dark)
    await page.click("#prompt")
    await page.type("Hi")
    await page.press("Enter")  # a new line: a phone has no other key for it
    assert await page.value("document.getElementById('prompt').value") == "Hi\n"
    await page.click("#send")
    await page.until(f"{SENT} && {DONE}")
    assert await page.value("document.documentElement.scrollWidth <= innerWidth")
    assert await page.value("document.getElementById('log').scrollWidth <= innerWidth")
    assert await page.value("document.getElementById('sidebar').inert")
    await page.click("#menu")
    await page.until("document.activeElement.closest('#sidebar')")
    await page.press("Escape")
    await page.until("document.activeElement.id === 'menu'")
    lightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).every((part) => part > 127)"
    assert await page.value(lightness) is not dark


async def test_formulas_are_drawn_and_wrong_ones_are_text(browser: Any, start: Any, tools: Any) -> None:
    text = "So $x^2$ and\n\n$$\\frac{a}{b}$$\n\nbut $\\nonsense{$ and $\\href{javascript:1}{x}$."
    page = await opened(browser, await start(answering(tools, text)))
    await say(page, "Show me")
    await page.until(f"{SENT} && {DONE} && document.querySelectorAll('.answer .katex').length === 3")
    assert await page.value("document.querySelector('.formula.display math').textContent.includes('a')")
    shown = await page.value("[...document.querySelectorAll('.formula')].map((one) => one.innerText).slice(2)")
    assert shown[0] == "$\\nonsense{$" and not await page.value("document.querySelector('.formula a')")
    await page.until("document.fonts.check('16px KaTeX_Main')")
    assert page.problems == []
    await page.reload()
    await page.until("document.querySelectorAll('.answer .katex').length === 3")


async def test_files_are_attached_as_text_and_counted(browser: Any, start: Any, tools: Any, tmp_path: Path) -> None:
    engine = answering(tools, "Yes.")
    page = await opened(browser, await start(engine))
    table, image = tmp_path / "table.csv", tmp_path / "image.png"
    table.write_text("name,price\n" * 20)
    image.write_bytes(b"\x89PNG\0")
    await page.choose("#file", table, image)
    await page.until("/^table.csv\\s*\\d+ tokens/.test(document.getElementById('files').innerText)")
    assert "image.png is not a text file" in await page.text("#toast")
    before = (await page.text("#context")).strip()
    assert before.startswith("≈") and "of 4,096 tokens" in before
    await page.type("What?")
    await page.press("Enter")
    await page.until(f"{SENT} && {DONE}")
    prompt = bytes(token for token in engine.requests[0].prompt_token_ids if token < 256)
    assert b"File table.csv:\n```csv\nname,price\n" in prompt and b"```\n\nWhat?" in prompt
    assert "table.csv" in await page.text(".mine") and await page.value("document.getElementById('files').hidden")
    used = len(engine.requests[0].prompt_token_ids) + len("Yes.") + 1
    assert (await page.text("#context")).strip() == f"{used} of 4,096 tokens"
    await page.reload()
    await page.until(f"{HAS_MODEL} && document.querySelector('.mine .files')")
    assert page.problems == []


async def test_conversations_are_searched_exported_and_imported(
    browser: Any, start: Any, tools: Any, tmp_path: Path
) -> None:
    page = await opened(browser, await start(answering(tools, "A red answer.")))
    await browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    for text in ("Apples", "Bananas"):
        await page.click("#new")
        await say(page, text)
        await page.until(f"{SENT} && {DONE}")
    rows = "[...document.querySelectorAll('#sidebar .title')].map((one) => one.textContent)"
    await page.click("#search")
    await page.type("APP red")
    await page.until(f"{rows}.join() === 'Apples'")
    await page.type(" green")
    await page.until("document.getElementById('unmatched').innerText")
    await page.click("#export-all")
    saved = tmp_path / "diptych-conversations.json"
    await tools.until(lambda: saved.exists() and saved.stat().st_size)
    await page.value("localStorage.clear()")
    await page.reload()
    await page.until(f"{HAS_MODEL} && {rows}.length === 0")
    for said in ("2 of 2 conversations imported.", "0 of 2 conversations imported; the others are here already."):
        await page.choose("#import-file", saved)
        await page.until(f"document.getElementById('toast-text').innerText === {json.dumps(said)}")
    assert await page.value(rows) == ["Bananas", "Apples"]
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    await page.choose("#import-file", wrong)
    await page.until("document.getElementById('toast-text').innerText.startsWith('wrong.json is not')")
    await page.click("#sidebar .open")
    assert "A red answer." in await page.text(".answer")
    assert page.problems == []


RICH = "# Title\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint(10)  # ten\n```\n\n$$x^2$$ [link](https://a.example)"


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
async def test_axe_finds_no_barrier(
    browser: Any, start: Any, tools: Any, tmp_path: Path, width: int, dark: bool
) -> None:
    page = await opened(browser, await start(answering(tools, RICH)), width=width, height=844, dark=dark)
    assert "\n".join(await page.barriers()) == "", "an empty conversation"
    note = tmp_path / "note.md"
    note.write_text("note")
    await page.choose("#file", note)
    await page.until("document.querySelector('#files li')")
    await page.click("#prompt")
    await page.type("Show me")
    assert "\n".join(await page.barriers()) == "", "a draft with a file"
    await page.click("#send")
    await page.until(f"{SENT} && {DONE} && document.querySelector('.answer .katex')")
    await page.click("[data-do=retry]")
    await page.until(f"{DONE} && document.querySelector('[data-do=answer-before]')")
    assert "\n".join(await page.barriers()) == "", "an answer"
    await page.click("[data-do=edit]")
    assert "\n".join(await page.barriers()) == "", "an edited message"
    await page.press("Escape")
    if width < 500:
        await page.click("#menu")
        assert "\n".join(await page.barriers()) == "", "the list"
        await page.press("Escape")
    await page.click("#open-settings")
    assert "\n".join(await page.barriers()) == "", "the settings"


async def test_everything_is_reached_by_keyboard(browser: Any, start: Any, tools: Any) -> None:
    page = await opened(browser, await start(answering(tools, "Yes.")))
    await say(page, "Hi")
    await page.until(f"{SENT} && {DONE}")
    name = "((one) => one.id || one.dataset.do || one.getAttribute('href'))(document.activeElement)"
    await page.type("More")
    await page.value("document.getElementById('new').focus()")
    reached = ["new"]
    while reached[-1] != "send":
        await page.press("Tab")
        reached.append(await page.value(name))
        ring = "getComputedStyle(one).outlineStyle + getComputedStyle(one.closest('.box') ?? one).boxShadow"
        assert await page.value(f"((one) => {ring})(document.activeElement)") != "nonenone", reached
    assert reached == [
        *("new", "open-settings", "/dashboard", "search", "open", "export", "delete", "import", "export-all"),
        *("edit", "copy-question", "copy-answer", "retry", "attach", "prompt", "send"),
    ]
