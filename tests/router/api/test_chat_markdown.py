"""Markdown as the chat page reads it: text of a model, into nodes. Needs node."""

from __future__ import annotations

import json

import pytest

from . import node

pytestmark = pytest.mark.skipif(node.PROGRAM is None, reason="node is not installed")
HTML = """((text, open) => { const show = (one) => typeof one === 'string' ? one.replaceAll('<', '&lt;') :
 `<${one.tag}${Object.entries(one.attributes).map(([name, value]) => ` ${name}="${value}"`).join('')}>` +
 `${one.children.map(show).join('')}</${one.tag}>`; return Markdown.read(text, open).map(show).join(''); })"""
OUT = 'target="_blank" rel="noopener noreferrer"'


async def html(*texts: str, is_open: bool = False) -> list[str]:
    """What Markdown becomes, as HTML for the eyes of a test: the page makes no HTML of it."""
    shown = (f"{HTML}({json.dumps(text)}, {json.dumps(is_open)})" for text in texts)
    return await node.values("markdown/markdown", *shown)


@pytest.mark.slow
async def test_marks_within_a_line() -> None:
    found = await html(
        "**bold *it*** and ***both***, `co*d*e`, ~~no~~",
        "snake_case_name, 5 * 3 * 2, \\*plain\\*, _em_",
        "``a ` b`` and `open",
        "one\ntwo<br>three",
    )
    assert found == [
        "<p><strong>bold <em>it</em></strong> and <em><strong>both</strong></em>, <code>co*d*e</code>,"
        " <del>no</del></p>",
        "<p>snake_case_name, 5 * 3 * 2, *plain*, <em>em</em></p>",
        "<p><code>a ` b</code> and `open</p>",
        "<p>one<br></br>two<br></br>three</p>",
    ]


async def test_only_addresses_of_the_web_become_links_and_html_stays_text() -> None:
    found = await html(
        "[a *b*](https://x.y/z_(q)) https://a.b/c_d.",
        "[a](javascript:alert(1)) ![i](data:text/html,x) <img src=x onerror=alert(1)>",
        '[q](https://x"onmouseover="alert)',
        "![picture](https://x.y/p.png)",
    )
    assert found == [
        f'<p><a href="https://x.y/z_(q)" {OUT}>a <em>b</em></a> <a href="https://a.b/c_d"'
        f" {OUT}>https://a.b/c_d</a>.</p>",
        "<p>[a](javascript:alert(1)) ![i](data:text/html,x) &lt;img src=x onerror=alert(1)></p>",
        f'<p><a href="https://x"onmouseover="alert" {OUT}>q</a></p>',  # an attribute that is set, not parsed
        f'<p><a href="https://x.y/p.png" {OUT}>picture</a></p>',
    ]


HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    "<svg><script>alert(1)</script></svg>",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
    "<math><mtext></form><form><mglyph><style></math><img src onerror=alert(1)>",
    "<details open ontoggle=alert(1)>x</details>",
    "<a href='javascript:alert(1)'>x</a>",
    "<style>@import 'https://x.y'</style><base href='https://x.y'><meta http-equiv=refresh content='0;https://x.y'>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](java\tscript:alert(1))",
    "[x](&#106;avascript:alert(1))",
    "[x](javascript&colon;alert(1))",
    "[x](data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==)",
    "[x](vbscript:msgbox(1))",
    "[x](<javascript:alert(1)>)",
    "![x](javascript:alert(1))",
    '![x](https://x.y/p.png"onerror="alert(1))',
    "![x](https://x.y 'a\" onmouseover=\"alert(1)')",
    "<javascript:alert(1)>",
    "[x]: javascript:alert(1)\n\n[x]",
    "[<img src=x onerror=alert(1)>](https://x.y)",
    "`<img src=x onerror=alert(1)>`",
    '```"><img src=x onerror=alert(1)>\n</code></pre><script>alert(1)</script>\n```',
    "# <script>alert(1)</script>",
    "| <img src=x onerror=alert(1)> |\n|---|\n| <script>alert(1)</script> |",
    "- <b onclick=alert(1)>x</b>\n\n  <div onclick=alert(1)>x</div>",
    "> <script>alert(1)\n> </script>",
    "<!--><img src=x onerror=alert(1)>-->",
    "<![CDATA[<img src=x onerror=alert(1)>]]>",
)
SHAPES = """((text, open) => { const found = new Set(); const look = (one) => { if (typeof one === 'string') return;
 found.add(one.tag); for (const [name, value] of Object.entries(one.attributes)) found.add(name === 'href' ?
 `href ${value.toLowerCase().replace(/:.*/s, ':')}` : name); one.children.forEach(look); };
 Markdown.read(text, open).forEach(look); return [...found]; })"""
HARMLESS = {
    *("p", "a", "h3", "code", "pre", "div", "span", "button", "table", "thead", "tbody", "tr", "th", "td", "ul", "li"),
    *("blockquote", "hr", "br", "strong", "em", "del", "class", "target", "rel", "type", "tabindex", "role", "scope"),
    *("data-do", "aria-label", "href https:", "href http:", "href mailto:"),
}


@pytest.mark.parametrize("is_open", [False, True])
async def test_hostile_text_makes_only_harmless_nodes(is_open: bool) -> None:
    """Nodes are made by createElement and setAttribute: what is not a tag or an attribute here cannot run."""
    shapes = (f"{SHAPES}({json.dumps(text)}, {json.dumps(is_open)})" for text in HOSTILE)
    for text, shape in zip(HOSTILE, await node.values("markdown/markdown", *shapes), strict=True):
        assert set(shape) <= HARMLESS, text


@pytest.mark.slow
async def test_headings_lists_and_quotes() -> None:
    found = await html(
        "# One\ntext\n## Two ##\n---",
        "- a\n- b\n  1. c\n     more\n  2. d\n- [x] done\n\nafter",
        "3. one\n\n   more\n4. two\n* other",
        "> quoted\n> > deeper\n> - item",
        "text\n2. no list within a paragraph",
    )
    assert found == [
        '<h3 class="level-1">One</h3><p>text</p><h4 class="level-2">Two</h4><hr></hr>',
        '<ul><li>a</li><li>b<ol start="1"><li>c<br></br>more</li><li>d</li></ol></li><li>☑ done</li></ul><p>after</p>',
        '<ol start="3"><li><p>one</p><p>more</p></li><li><p>two</p></li></ol><ul><li>other</li></ul>',
        "<blockquote><p>quoted</p><blockquote><p>deeper</p></blockquote><ul><li>item</li></ul></blockquote>",
        "<p>text<br></br>2. no list within a paragraph</p>",
    ]


async def test_tables_have_columns_that_lean_and_bars_that_are_text() -> None:
    (found,) = await html("| a | b |\n|:--|--:|\n| `x\\|y` | 1 |\n| c \\| d |\n\nafter")
    assert found == (
        '<div class="wide" tabindex="0" role="group" aria-label="Table"><table>'
        '<thead><tr><th scope="col">a</th><th scope="col" class="right">b</th></tr></thead>'
        '<tbody><tr><td><code>x|y</code></td><td class="right">1</td></tr>'
        '<tr><td>c | d</td><td class="right"></td></tr></tbody></table></div><p>after</p>'
    )


async def test_code_has_its_language_and_colours_and_stays_as_it_is() -> None:
    whole, plain, listed = await html(
        '```python\ndef f(x):  # "no"\n    return "<b>" * 2\n```\nafter',
        "~~~\n**a**\n\n```\n",
        "- a\n  ```js\n  let b\n  ```\n- c",
    )
    assert "<span>python</span>" in whole and whole.endswith("</code></pre></div><p>after</p>")
    assert '<span class="code-word">def</span> f(x):  <span class="code-comment"># "no"</span>\n' in whole
    assert '<span class="code-string">"&lt;b>"</span> * <span class="code-number">2</span>' in whole
    assert "<span>text</span>" in plain and "<code>**a**\n\n```</code>" in plain
    assert listed.startswith("<ul><li>a<div") and listed.endswith("</div></li><li>c</li></ul>")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a **bold and `co", "a <strong>bold and <code>co</code></strong>"),
        ("a **bold*", "a <strong>bold</strong>"),
        ("see [the *page*](https://x", "see the <em>page</em>"),
        ("5 * 3", "5 * 3"),
        ("a `co** b", "a <code>co** b</code>"),
    ],
)
async def test_what_is_still_being_written_does_not_flicker(text: str, shown: str) -> None:
    assert await html(text, is_open=True) == [f"<p>{shown}</p>"]


async def test_a_growing_text_keeps_the_blocks_that_did_not_change() -> None:
    grown = """((read) => {
      const texts = ['# One\\n\\ntwo', '# One\\n\\ntwo three\\n\\n```js\\nlet',
        '# One\\n\\ntwo three\\n\\n```js\\nlet x'];
      const [a, b, c] = texts.map((text) => read(text, true));
      return [a.length, a[0] === b[0], a[1] === b[1], b[1] === c[1], b[2] === c[2]];
    })(Markdown.reader())"""
    assert await node.values("markdown/markdown", grown) == [[2, True, False, True, False]]


@pytest.mark.slow
async def test_no_text_takes_long() -> None:
    """Each of these has made some reader of Markdown take time that grows with the square or worse."""
    repeats = (
        "' *a **b'",
        "'`a ``b '",
        "'[a]('",
        "'![a'",
        "'> '",
        "'- '",
        "'- a\\n\\n'",
        "'a|b\\n'",
        "'**a* '",
        "'- - - '",
        "'((https://'",
        "'<'",
        "'[['",
        "'&#'",
        "'\\\\( '",
        "'\\\\[\\n'",
        "'$$ '",
        "'$a '",
        "'a\\n\\n'",
    )
    texts = ", ".join(f"{one}.repeat(5000)" for one in repeats)
    (lengths,) = await node.values(
        "markdown/markdown", f"[{texts}].map((text) => Markdown.read(text).length + Markdown.read(text, true).length)"
    )
    assert len(lengths) == len(repeats) and all(lengths)


async def test_formulas_are_found_and_prices_are_not() -> None:
    inline = '<span class="formula">{}</span>'.format
    display = '<span class="formula display" tabindex="0" role="group" aria-label="Formula">{}</span>'.format
    cases = {
        "Let $a_1 * b_2$ and \\(x_1*y*\\) be.": "<p>Let "
        + inline("$a_1 * b_2$")
        + " and "
        + inline("\\(x_1*y*\\)")
        + " be.</p>",
        "It costs $5 and $6, or US$7-$8.": "<p>It costs $5 and $6, or US$7-$8.</p>",
        "`$x$` \\$y$": "<p><code>$x$</code> $y$</p>",
        "So\n\\[\na\n= b\n- c\n\\]\nand": "<p>So</p>" + display("\\[\na\n= b\n- c\n\\]") + "<p>and</p>",
        "- $$x^2$$ of $x$": "<ul><li>" + display("$$x^2$$") + " of " + inline("$x$") + "</li></ul>",
        "still $x_1 and \\[ y": "<p>still $x_1 and [ y</p>",
    }
    assert dict(zip(cases, await html(*cases), strict=True)) == cases
