"""The dashboard, the API reference and pages of other origins in a real browser, over a real router. Needs Chromium."""

from __future__ import annotations

from typing import Any

import pytest

from . import chromium

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.PROGRAM is None, reason="Chromium is not installed (apt-get install chromium)"),
]
OF_SWAGGER_UI = {"color-contrast", "heading-order", "nested-interactive", "region", "scrollable-region-focusable"}
"""Rules of axe-core that Swagger UI itself breaks."""
KEY = "a-key-of-sixteen-or-more"


async def test_the_reference_lists_the_endpoints_after_the_key_is_given(browser: Any, start: Any) -> None:
    page = await browser.page(f"{(await start(api_key=KEY)).url}/docs")
    await page.until("!document.getElementById('unlock').hidden")
    assert "\n".join(await page.barriers()) == ""
    await page.value("document.getElementById('key').focus()")
    await page.type(KEY)
    await page.press("Enter")
    await page.until("document.querySelector('.opblock-summary-path')")
    paths = (await page.text("#reference")).replace("\u200b", "").split()
    assert {"/v1/chat/completions", "/v1/models/{model}", "/load"} <= set(paths) and "/static/{path}" not in paths
    await page.click(".opblock-summary-control")
    await page.until("document.querySelector('.opblock.is-open')?.innerText.includes('Responses')")
    assert {one.partition(":")[0] for one in await page.barriers()} <= OF_SWAGGER_UI
    assert page.problems == []


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
async def test_axe_finds_no_barrier_in_the_dashboard(browser: Any, start: Any, width: int, dark: bool) -> None:
    running = await start()
    await running.chat(messages=[{"role": "user", "content": "hi"}], max_tokens=2)
    page = await browser.page(f"{running.url}/dashboard", width=width, dark=dark)
    await page.until("document.body.innerText.includes('decode-0')")
    assert "\n".join(await page.barriers()) == ""
    assert await page.value("document.documentElement.scrollWidth <= innerWidth")
    assert page.problems == []


ASK = """((url, key) => fetch(`${url}/v1/chat/completions`, {
  method: 'POST',
  headers: { 'content-type': 'application/json', authorization: `Bearer ${key}`, 'x-stainless-lang': 'js' },
  body: JSON.stringify({ messages: [{ role: 'user', content: 'hi' }], max_tokens: 2, stream: true }),
}).then(async (reply) => {
  const text = await reply.text();
  return [reply.status, Boolean(reply.headers.get('x-request-id')), text.endsWith('[DONE]\\n\\n')];
}, (error) => error.name))"""


async def test_a_page_of_an_allowed_origin_reads_answers_and_another_does_not(browser: Any, start: Any) -> None:
    allowed, other = await start(), await start()
    running = await start(api_key=KEY, allow_origin=(allowed.url,))
    found = []
    for origin in (allowed.url, other.url):
        page = await browser.page(f"{origin}/health")
        for key in (KEY, "wrong"):
            found.append(await page.value(f"{ASK}('{running.url}', '{key}')"))
    assert found == [[200, True, True], [401, True, False], "TypeError", "TypeError"]
